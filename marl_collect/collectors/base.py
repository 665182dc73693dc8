"""The interface that all collectors share."""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Self, final

from marl_collect.collectors.assigning import listed_workers
from marl_collect.collectors.backend import Backend
from marl_collect.collectors.background import Background
from marl_collect.collectors.checkpoint import pack, restore, unpack, warn_if_elsewhere
from marl_collect.collectors.delivery import Delivery
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.statistics import Statistics
from marl_collect.core.description import EnvDescription
from marl_collect.core.notebooks import statistics
from marl_collect.core.seeding import next_seed
from marl_collect.errors import ClosedError, warn

_END = object()


class CollectorBase:
    """Iterates over batches of experience.

    A batch is a TensorDict ``[B, T]``; it stays valid, and unchanged by later batches,
    for as long as any tensor of it is held. Subclasses build a ``Backend``, which fills
    slots; they are final.
    """

    _closed = True  # Until ``_open``: there is nothing to close before it.

    def _open(self, options: CollectorOptions, backend: Backend) -> None:
        """Take the backend that a subclass built; the last line of its constructor."""
        self._options = options
        self._backend = backend
        self._weights = backend.weights
        self._policy = backend.weights.policy
        self._owner = os.getpid()
        self._statistics = Statistics()
        self._delivery = Delivery(options, self.description)
        self._ready: deque[Any] = deque()
        self._error: BaseException | None = None
        self._background = Background()
        self._lock = self._background.lock
        self._closed = False
        asked = options.frames_per_batch
        frames = backend.batch_frames
        total = asked if isinstance(asked, int) else sum(asked)
        if isinstance(asked, int) and frames > total:
            warn(
                f"frames_per_batch={asked} is rounded up to {frames}: every "
                "environment gives the same number of frames."
            )

    @final
    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""
        return self._backend.description

    # Collecting

    @final
    def next(self) -> Any:
        """Return the next batch, or None when ``total_frames`` are collected."""
        batch = self._advance()
        return None if batch is _END else batch

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are collected, then shut down.

        Breaking out of the loop leaves the collector open; a second loop continues.
        """
        while True:
            batch = self._advance()
            if batch is _END:
                self.shutdown()
                return
            yield batch
            # Drop the reference while the user's loop runs: the slot can be freed.
            del batch

    @final
    def iterator(self) -> Iterator[Any]:
        """Return ``iter(self)``, by TorchRL's name."""
        return iter(self)

    @final
    def __len__(self) -> int:
        """How many batches ``total_frames`` makes.

        Raises:
            TypeError: for an endless collector.
        """
        if self._options.total_frames is None:
            # As of any iterable without a length, which progress bars rely on.
            raise TypeError("A collector without total_frames has no length.")
        return int(self._options.batches(self._backend.batch_frames))

    @final
    def __bool__(self) -> bool:
        """Return True, also where ``len`` is 0 or not defined."""
        return True

    @final
    def __reduce__(self) -> NoReturn:
        """Raise an error: a copy would use the same environments and workers."""
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled: its environments, "
            "workers and memory belong to it alone. Build another one with the same "
            "arguments; state_dict() and load_state_dict() resume from this point."
        )

    @final
    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Begin new episodes, with new trajectory ids.

        Args:
            reset_idx: a bool for each worker, whether its environments do; all if
                None. A `Collector` is its own only worker.

        Raises:
            ValueError: for anything else, such as indices of workers.
        """
        with self._asking():
            self._backend.begin_episodes(reset_idx)
            if reset_idx is None:
                self._delivery.forget_open()

    @final
    def set_seed(self, seed: int, *, static_seed: bool = False) -> int:
        """Derive everything random from ``seed``, and begin new episodes.

        The same seed gives the same batches again.

        Returns:
            A seed for the next call; ``seed`` itself if ``static_seed``.
        """
        with self._asking():
            self._backend.reseed(seed)
            self._delivery.forget_open()
        return seed if static_seed else next_seed(seed)

    # Weights

    @final
    @property
    def policy(self) -> Any:
        """The module that is trained: the user's own, or the materialised copy.

        None where the policy exists in the workers only.
        """
        return self._policy.module

    @final
    @property
    def policy_version(self) -> int:
        """Version of the weights published last, which all updates count up.

        It is saved and restored by ``state_dict`` and ``load_state_dict``.
        """
        return self._weights.version

    @final
    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish weights: the next batch is collected with them.

        Args:
            policy_or_weights: a module, a state_dict or a TensorDict of parameters;
                None takes ``collector.policy`` as it is now. A mapping from indices
                of workers to any of these gives each its own, under one version.
            weights: the same, by TorchRL's other name.
            policy: the same, by TorchRL's third name.
            worker_ids: only these workers get them, and keep them until their next
                update: a population.
            model_id: a submodule of the policy, by its path, that the weights are
                for; ``"policy"`` is all of it.
            weights_dict: weights by ``model_id``, for several submodules at once.

        Raises:
            TypeError: if ``worker_ids`` are booleans, or the weights no tensors.
            ValueError: if the weights are given in more than one way, or naming
                tensors of another shape or dtype than the workers have.
            KeyError: naming tensors that are missing or surplus, or submodules that
                do not exist.
            RuntimeError: if the policy has no weights.

        Nothing is copied before everything is compared.

        Warns:
            UserWarning: if an attribute of the policy has changed that cannot be sent.
                Those that can (``training``, numbers, strings, small tensors) are.
        """
        chosen = None if worker_ids is None else listed_workers(worker_ids)
        with self.pause():
            self._check_open()
            # Nearly every update is of this kind, and takes microseconds.
            plain = weights is None and policy is None and model_id is None
            by_worker = policy_or_weights is not None and _is_for_each(
                policy_or_weights
            )
            if plain and by_worker:
                if chosen is not None or weights_dict is not None:
                    raise ValueError(
                        "Weights given by worker index already select the workers: "
                        "omit worker_ids and weights_dict."
                    )
                self._weights.publish_each(policy_or_weights)
                return
            if plain and weights_dict is None:
                tensors = self._policy.tensors(policy_or_weights)
            else:
                sources = (policy_or_weights, weights, policy)
                tensors = self._policy.chosen(sources, model_id, weights_dict)
            self._weights.publish(tensors, chosen)

    @final
    def receive_weights(self, policy_or_weights: Any = None) -> None:
        """Update the weights: with these, or with those of ``weight_recv_schemes``."""
        sources = self._options.weight_recv_schemes
        if policy_or_weights is None and sources:
            policy_or_weights = sources["policy"].receive()
        self.update_policy_weights_(policy_or_weights)

    @final
    def increment_version(self) -> None:
        """Publish the weights as they are under a new version."""
        self.update_policy_weights_()

    @final
    def get_model(self, model_id: str = "policy") -> Any:
        """Return the trainer's policy, or a submodule of it by its path."""
        return self._policy.submodule(model_id)

    # In the background

    @final
    def start(self) -> None:
        """Collect into the replay buffer in a thread, until ``total_frames``.

        Raises:
            RuntimeError: without a replay buffer, or if it runs already.
        """
        if self._options.replay_buffer is None:
            raise RuntimeError(
                "start() needs a replay_buffer to store batches in: pass one to the "
                "collector, or iterate over the collector instead."
            )
        self._check_open()
        self._background.start(lambda: self._advance() is not _END)

    @final
    def is_running(self) -> bool:
        """Whether ``start`` is collecting."""
        return self._background.running

    @final
    def pause(self) -> AbstractContextManager[None]:
        """Keep the thread of ``start`` from collecting inside a ``with`` block."""
        return self._background.pause()

    @final
    def async_shutdown(self, timeout: float = 10.0) -> None:
        """End the thread of ``start``, then shut down.

        Raises:
            Exception: what ended the thread, if it was an error.
        """
        self._background.join(timeout)
        self.shutdown(timeout)
        if self._error is not None:
            raise self._error

    # State

    @final
    @property
    def frames(self) -> int:
        """Frames collected so far."""
        return self._statistics.frames

    @final
    def stats(self) -> dict[str, Any]:
        """Return counters and the figures of the last hundred episodes."""
        metrics = self._statistics.snapshot() | self._backend.metrics()
        return metrics | {"policy_version": self.policy_version}

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new collector resumes exactly.

        Episode numbers, the running episodes' actions, generators, weights, counters.
        """
        with self._asking():
            workers = self._backend.states()
            state = pack(self._statistics, self._weights, workers)
            return state | {"trajectories": self._delivery.state()}

    @final
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from ``state_dict`` of a collector built with the same arguments.

        Environments that cannot repeat an episode begin their next one, with a
        warning, and so do those whose episode has more actions than are kept (64 MB),
        and those that, replayed, arrive at other observations than those recorded.
        These trajectories are in ``stats()["cut_trajectories"]``.

        Raises:
            ValueError: if workers, environments or weights differ; nothing changes.
        """
        with self._asking():
            states = unpack(state_dict, self.description, self._weights)
            running = self._backend.load(states)
            warn_if_elsewhere(self.description, states, running)
            restore(state_dict, self._statistics, self._weights)
            self._delivery.load(state_dict["trajectories"])

    @final
    def steps_so_far(self) -> int:
        """Return the frames stepped so far, including batches in progress."""
        return self._backend.steps()

    @final
    def explain(self) -> list[str]:
        """Say, for each worker, which path its policy takes, and why."""
        with self._asking():
            return self._backend.explain()

    @final
    def getattr_env(self, name: str) -> list[Any]:
        """Return attribute ``name`` of every worker's environments."""
        with self._asking():
            return self._backend.attribute("env", name)

    @final
    def getattr_policy(self, name: str) -> Any:
        """Return attribute ``name`` of the policy: the trainer's, else worker 0's."""
        if self._policy.module is not None:
            return getattr(self._policy.module, name)
        with self._asking():
            return self._backend.attribute("policy", name)[0]

    @final
    def getattr_rb(self, name: str) -> Any:
        """Return attribute ``name`` of the replay buffer."""
        return getattr(self._options.replay_buffer, name)

    # Ending

    @final
    def shutdown(self, timeout: float = 10.0) -> None:
        """End workers and give memory back, within ``timeout`` seconds.

        May be called twice, from any thread. Batches that are held stay valid.
        """
        if not self._closed:
            self._closed = True
            self._background.ask_to_stop()
            self._backend.close(timeout)

    @final
    def __enter__(self) -> Self:
        """Return this collector; leaving the block shuts it down."""
        return self

    @final
    def __exit__(self, *exc_info: object) -> None:
        """Shut down."""
        self.shutdown()

    def __del__(self) -> None:
        """Shut down a collector that was not closed."""
        self.shutdown()

    @final
    def __repr__(self) -> str:
        """Return workers, batch shape, version and frames; workers are not asked."""
        name = type(self).__name__
        if "_statistics" not in vars(self):
            return f"{name}(not started)"
        state = ", closed" if self._closed else ""
        return (
            f"{name}({self._backend.outline()}, version {self.policy_version}, "
            f"{self.frames:,} frames{state})"
        )

    def _repr_html_(self) -> str:
        """Show the figures of ``stats()`` as a table, in notebooks."""
        return statistics(type(self).__name__, self.stats())

    def _advance(self) -> Any:
        self._check_owner()
        with self._lock:
            with self._ending_on(BaseException):
                if not self._ready and not self._finished():
                    self._ready.extend(self._delivery.more())
            if not self._ready and not self._finished():
                self._check_open()
            with self._ending_on(BaseException):
                while not self._ready and not self._finished():
                    self._collect_more()
            return self._ready.popleft() if self._ready else _END

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Hold the workers exclusively; an interruption shuts the collector down.

        An unread answer would be taken for the answer to the next request.
        """
        with self.pause():
            self._check_open()
            with self._ending_on(KeyboardInterrupt, SystemExit):
                yield

    @contextmanager
    def _ending_on(self, *kinds: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            self._error = error
            self.shutdown()
            raise

    def _collect_more(self) -> None:
        begin = time.perf_counter()
        if self._options.update_at_each_batch and self._statistics.batches:
            self._weights.publish(self._policy.tensors())
        self._weights.warn_if_stale()
        delivered = self._statistics.frames
        filled = self._backend.collect(
            random=self._options.random_after(delivered), delivered=delivered
        )
        seconds = time.perf_counter() - begin
        self._statistics.add(filled.frames, filled.episodes, seconds)
        self._ready.extend(self._delivery.take(filled))
        if self._finished():
            self._ready.extend(self._delivery.rest())

    def _finished(self) -> bool:
        return self._options.completed(self._statistics.frames)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner and not self._backend.works_in_forks:
            raise RuntimeError(
                f"Process {os.getpid()} is a fork of {self._owner}, which built this "
                f"{type(self).__name__}: both would command the same workers. Build "
                "the collector in the process that uses it."
            )

    def _check_open(self) -> None:
        self._check_owner()
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ClosedError("This collector was shut down. Build a new one.")


def _is_for_each(weights: Any) -> bool:
    """Whether weights are given by the index of a worker."""
    return (
        isinstance(weights, Mapping)
        and len(weights) > 0
        and all(isinstance(key, int) for key in weights)
    )
