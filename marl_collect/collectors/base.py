"""What every collector offers, whoever steps its environments."""

import abc
import time
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, final

import torch
from tensordict import TensorDictBase

from marl_collect.collectors.batches import Filled, as_batch, set_truncated
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.statistics import Statistics
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.description import EnvDescription
from marl_collect.errors import ClosedError


class CollectorBase(abc.ABC):
    """Iterates over batches of experience.

    A batch is a TensorDict ``[B, T]``; it stays valid, and unchanged by later
    batches, for as long as any tensor of it is held. Subclasses say how a slot is
    filled; they are final.
    """

    _options: CollectorOptions
    _policy: TrainerPolicy

    def _open(self, options: CollectorOptions, policy: TrainerPolicy) -> None:
        """Take what a subclass prepared; the last thing its constructor does."""
        self._options = options
        self._policy = policy
        self._statistics = Statistics()
        self._error: BaseException | None = None
        self._closed = False
        frames = self._batch_frames()
        if frames > options.frames_per_batch:
            warnings.warn(
                f"frames_per_batch={options.frames_per_batch} is rounded up to "
                f"{frames}: every environment gives the same number of frames.",
                stacklevel=3,
            )

    @abc.abstractmethod
    def _batch_frames(self) -> int:
        """Return the frames of one batch."""

    @abc.abstractmethod
    def _collect(self, *, random: bool) -> Filled:
        """Fill one slot, at random or with the policy."""

    @abc.abstractmethod
    def _close(self, timeout: float) -> None:
        """Give everything back within ``timeout`` seconds."""

    @property
    @abc.abstractmethod
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""

    @abc.abstractmethod
    def _publish(self, tensors: list[torch.Tensor]) -> None:
        """Make new weights the ones that act from the next batch on."""

    @final
    @property
    def policy(self) -> Any:
        """The module that is trained: the user's own, or the materialised copy.

        None where the policy exists in the workers only.
        """
        return self._policy.module

    @final
    @property
    def frames(self) -> int:
        """Frames collected so far."""
        return self._statistics.frames

    @final
    @property
    def policy_version(self) -> int:
        """Version of the weights that the next batch is collected with."""
        return self._policy.version

    @final
    def stats(self) -> dict[str, Any]:
        """Return counters and the figures of the last hundred episodes."""
        return self._statistics.snapshot() | {"policy_version": self.policy_version}

    @final
    def update_policy_weights_(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Publish weights: the next batch is collected with them.

        Args:
            policy_or_weights: a module, a state_dict or a TensorDict of parameters;
                None takes ``collector.policy`` as it is now.
            weights: the same, by TorchRL's other name.
            policy: the same, by TorchRL's third name.

        Raises:
            ValueError: if more than one is given.
            KeyError: naming tensors that are missing.
            RuntimeError: if the policy has no weights.
        """
        self._check_open()
        given = [s for s in (policy_or_weights, weights, policy) if s is not None]
        if len(given) > 1:
            raise ValueError("Give policy_or_weights, weights or policy, only one.")
        self._publish(self._policy.tensors(given[0] if given else None))

    @final
    def next(self) -> TensorDictBase | None:
        """Return the next batch, or None when ``total_frames`` are collected."""
        if self._finished():
            return None
        self._check_open()
        try:
            return self._next()
        except BaseException as error:
            self._error = error
            self.shutdown()
            raise

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` are collected, then shut down.

        Breaking out of the loop leaves the collector open; a second loop goes on.
        """
        while True:
            batch = self.next()
            if batch is None:
                self.shutdown()
                return
            yield batch
            # Not held here while the user's loop runs on: the slot must come back.
            del batch

    @final
    def __len__(self) -> int:
        """How many batches ``total_frames`` makes.

        Raises:
            RuntimeError: for an endless collector.
        """
        if self._options.endless:
            raise RuntimeError("A collector without total_frames has no length.")
        return int(self._options.batches(self._batch_frames()))

    @final
    def shutdown(self, timeout: float = 10.0) -> None:
        """End workers and give memory back, within ``timeout`` seconds.

        May be called twice, from any thread. Batches that are held stay valid.
        """
        if not self._closed:
            self._closed = True
            self._close(timeout)

    @final
    def __enter__(self) -> Self:
        """Return this collector; leaving the block shuts it down."""
        return self

    @final
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down."""
        self.shutdown()

    def __del__(self) -> None:
        """Shut down what was forgotten."""
        if not getattr(self, "_closed", True):
            self.shutdown()

    def _finished(self) -> bool:
        total = self._options.total_frames
        if total is None or self._options.endless:
            return False
        return self._statistics.frames >= total

    def _next(self) -> TensorDictBase:
        options = self._options
        begin = time.perf_counter()
        if options.update_at_each_batch and self._statistics.batches:
            self._publish(self._policy.tensors(None))
        self._policy.warn_if_stale()
        random = self._statistics.frames < (options.init_random_frames or 0)
        filled = self._collect(random=random)
        if options.set_truncated:
            set_truncated(filled.tensors, list(self.description.groups))
        batch: Any = as_batch(filled, self.description)
        seconds = time.perf_counter() - begin
        self._statistics.add(filled.frames, filled.episodes, seconds)
        if options.postproc is not None:
            batch = options.postproc(batch)
        return batch

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ClosedError("This collector was shut down: build a new one.")
