"""The interface that all collectors share."""

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self

from tensordict import TensorDict, TensorDictBase

from marl_collect.collectors.arguments import (
    are_by_worker,
    chosen_workers,
    listed_environments,
    listed_workers,
    plain,
    the_only,
)
from marl_collect.collectors.checkpoint import pack, restore, unpack
from marl_collect.collectors.delivery import Delivery, Source
from marl_collect.collectors.options import LEVEL, TORCHRL_ATTRIBUTES, CollectorOptions
from marl_collect.collectors.statistics import of_all_ranks
from marl_collect.core.description import EnvDescription
from marl_collect.core.seeding import checked_seed, next_seed
from marl_collect.core.torchrl_names import missing_attribute
from marl_collect.errors import ClosedError, refuse_in_forks, warn
from marl_collect.options import Option, require
from marl_collect.parallel_env.joint import check_name
from marl_collect.processes.closing import (
    CLOSE_SECONDS,
    ERROR_CLOSE_SECONDS,
    close_after,
)
from marl_collect.programs.notebooks import statistics
from marl_collect.rollout.env_calls import EnvCall


class CollectorBase:
    """Iterates over batches of experience.

    A batch is a TensorDict ``[B, T]``. It is valid, and later batches do not change
    it, as long as any of its tensors is held. Subclasses are final. They build a
    ``Source``, and override nothing except ``explain``.
    """

    _closed = True  # Until ``_open``: before it there is nothing to close.

    def _open(self, options: CollectorOptions, source: Source) -> None:
        """Use a source; the constructor of a subclass calls this last."""
        self._options = options
        self._level = None if options.curriculum is None else options.level
        self._source = source
        self._weights = source.weights
        self._policy = source.weights.policy
        self._owner = os.getpid()
        self._statistics = source.statistics
        self._delivery = Delivery(options, self.description)
        self._error: BaseException | None = None
        self._steps_before = 0
        self._lock = threading.RLock()  # Held while batches or weights change.
        # Gives callers of ``pause`` priority over the thread of ``start``, which would
        # otherwise take the lock again at once.
        self._turn = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._closed = False
        requested = options.frames_per_batch
        frames = source.batch_frames
        if isinstance(requested, int) and frames > requested:
            warn(
                f"frames_per_batch={requested} is rounded up to {frames}, so every "
                "environment contributes the same number of frames."
            )

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""
        return self._source.description

    # Collecting

    def next(self) -> TensorDict | None:
        """Return the next batch, or None when ``total_frames`` are collected."""
        batches = self._advance()
        return batches[0] if batches else None

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are collected, then shut down.

        Breaking out of the loop leaves the collector open; a second loop continues.
        """
        while batches := self._advance():
            # The list gives up its reference, so the slot is free when the user's is.
            yield batches.pop()
        self.shutdown()

    def iterator(self) -> Iterator[TensorDict]:
        """Return ``iter(self)``, by TorchRL's name."""
        return iter(self)

    def __len__(self) -> int:
        """Number of batches in ``total_frames``.

        Raises:
            TypeError: if ``total_frames`` is not set, with ``trajs_per_batch`` or
                ``preemptive_threshold``, or if batches of workers differ in size.
        """
        total = self._options.total_frames
        # Progress bars rely on a TypeError for iterables without a length.
        if total is None:
            raise TypeError("A collector without total_frames has no length.")
        if self._options.trajs_per_batch is not None:
            raise TypeError("A collector with trajs_per_batch has no length.")
        if not self._source.equal_batches:
            raise TypeError("A collector of batches of several sizes has no length.")
        return math.ceil(total / self._source.batch_frames)

    def __bool__(self) -> bool:
        """Return True, even if ``len`` is 0 or not defined."""
        return True

    def __reduce__(self) -> NoReturn:
        """Raise an error: a copy would use the same environments and workers."""
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled, because it owns "
            "environments, workers and memory. Build another one with the same "
            "arguments; state_dict() and load_state_dict() resume from this point."
        )

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Begin new episodes, with new trajectory ids.

        Args:
            reset_idx: one bool per worker; None selects all. A `Collector` counts as
                one worker.

        Raises:
            ValueError: if ``reset_idx`` does not have one bool per worker.
        """
        with self._asking():
            count = len(self._source.sizes)
            self._source.begin_episodes(chosen_workers(reset_idx, count))
            if reset_idx is None:
                self._delivery.forget_open()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:  # noqa: FBT001, FBT002 - TorchRL's signature
        """Derive all random numbers from ``seed``, and begin new episodes.

        The same seed gives the same batches. Trajectories of the old seed that were
        not delivered are dropped.
        Trajectories are numbered from 0 again: a ``Writer``, and a learner that replays
        episodes, must be new ones, or would join a new trajectory to an unfinished one.
        A ``Writer`` refuses numbers that decrease.

        Returns:
            A seed for the next call; ``seed`` itself if ``static_seed``.
        """
        seed = checked_seed(seed)
        with self._asking():
            self._source.begin_episodes(seed=seed)
            self._delivery.forget()
        return seed if static_seed else next_seed(seed)

    # Weights

    @property
    def policy(self) -> Any:
        """The module to train: the one that was passed, or its materialised copy.

        None if the policy exists in the workers only.
        """
        return self._policy.module

    @property
    def policy_version(self) -> int:
        """Version of the last published weights; every update increments it.

        ``state_dict`` and ``load_state_dict`` save and restore it.
        """
        return self._weights.version

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
        """Publish weights; the next batch is collected with them.

        Changed attributes of the policy (``training``, numbers, objects, hooks) are
        sent too. All tensors are compared before any is copied.

        Args:
            policy_or_weights: a module, a state_dict or a TensorDict of parameters;
                None uses the current weights of ``collector.policy``. A mapping from
                worker indices to any of these gives each worker its own weights, under
                one version.
            weights: TorchRL's second name for ``policy_or_weights``.
            policy: TorchRL's third name for ``policy_or_weights``.
            worker_ids: update these workers only, for example in a population. They
                keep the weights until their next update.
            model_id: path of the submodule that the weights belong to; ``"policy"`` is
                the whole policy. The others are published with their current weights.
            weights_dict: weights by ``model_id``, for several submodules at once.

        Raises:
            TypeError: if ``worker_ids`` are no indices, or the weights are not tensors.
            ValueError: if the weights are given in more than one way, or if tensors
                have another shape or dtype than in the workers.
            KeyError: if tensors are missing or surplus, or if a submodule does not
                exist.
            RuntimeError: if the policy has no weights.

        Warns:
            UserWarning: if an attribute of the policy has changed that cannot be sent.
        """
        number = self._weights.workers
        chosen = None if worker_ids is None else listed_workers(worker_ids, number)
        with self.pause():
            self._check_open()
            source = the_only(policy_or_weights, weights, policy, weights_dict)
            if weights_dict is None and are_by_worker(source):
                if chosen is not None or model_id is not None:
                    raise ValueError(
                        "Weights given by worker index already select the workers, and "
                        "are those of the whole policy: omit worker_ids and model_id."
                    )
                workers = listed_workers(list(source), number)
                tensors = map(self._policy.tensors, source.values())
                parts: list[Any] = [*zip(tensors, ([k] for k in workers), strict=True)]
            else:
                parts = [(self._policy.chosen(source, model_id, weights_dict), chosen)]
            self._weights.publish(*parts)

    def receive_weights(self, policy_or_weights: Any = None) -> None:
        """Update the weights with these, or with those of ``weight_recv_schemes``."""
        sources = self._options.weight_recv_schemes
        if policy_or_weights is None and sources:
            policy_or_weights = sources["policy"].receive()
        self.update_policy_weights_(policy_or_weights)

    def increment_version(self) -> None:
        """Publish the current weights under a new version."""
        self.update_policy_weights_()

    def get_model(self, model_id: str = "policy") -> Any:
        """Return the trainer's policy, or one of its submodules by its path."""
        return self._policy.submodule(model_id)

    # In the background

    def start(self) -> None:
        """Collect into the replay buffer in a thread, until ``total_frames``.

        Raises:
            RuntimeError: if there is no replay buffer, or if it is already running.
        """
        if self._options.replay_buffer is None:
            raise RuntimeError(
                "start() needs a replay_buffer to store batches in: pass one to the "
                "collector, or iterate over the collector instead."
            )
        self._check_open()
        if self.is_running():
            raise RuntimeError(
                "This collector is already running: call async_shutdown() first."
            )
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Return whether the thread of ``start`` is alive."""
        return self._thread is not None and self._thread.is_alive()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the thread of ``start`` from collecting inside a ``with`` block."""
        # A thread that has the lock already (a `postproc` that calls the collector)
        # must not wait for `_turn`: its holder may be waiting for the lock.
        if not self._lock.acquire(blocking=False):
            with self._turn:
                self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def async_shutdown(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the thread of ``start``, then shut down.

        Raises:
            Exception: the error that ended the thread, if any.
        """
        deadline = time.monotonic() + timeout
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)
        # Workers always get the time to end by themselves.
        least = min(timeout, ERROR_CLOSE_SECONDS)
        self.shutdown(max(deadline - time.monotonic(), least))
        if isinstance(self._error, Exception):
            raise self._error

    # State

    @property
    def frames(self) -> int:
        """Frames collected so far."""
        return self._statistics.frames

    @property
    def total_frames(self) -> int:
        """Frames after which the collector ends, -1 if it is endless."""
        total = self._options.total_frames
        return -1 if total is None else total

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames per batch as the user gave them; a batch may be rounded up."""
        requested = self._options.frames_per_batch
        return requested if isinstance(requested, int) else sum(requested)

    def stats(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Return counters and statistics of the last hundred episodes.

        Within a batch, episodes are in the order of their last frames, then of their
        environments. Batches are in the order in which they were delivered.

        Without ``total_frames`` there is no ``"total_frames"`` and no ``"completed"``.

        Args:
            all_ranks: sum the counters over all ranks, and use the last hundred
                episodes of each. All ranks must call it, after the same batch.

        Raises:
            RuntimeError: if ``all_ranks``, and the ranks are not connected by
                ``torch.distributed``, are numbered differently there, or have
                different numbers of environments or batches.
        """
        statistics = self._statistics
        if all_ranks:
            options = self._options
            varies = self._thread is not None or options.trajs_per_batch is not None
            statistics = of_all_ranks(
                options.ranks,
                statistics,
                sum(self._source.sizes),
                None if varies else statistics.batches,
            )
        metrics = statistics.snapshot() | self._source.metrics()
        if self.total_frames >= 0:
            metrics["total_frames"] = self.total_frames
            metrics["completed"] = self._finished()
        return metrics | {
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "policy_version": self.policy_version,
        }

    def fake_tensordict(self) -> TensorDictBase:
        """Return zeros with the keys, shapes and dtypes of a batch.

        With ``split_trajs`` and ``trajs_per_batch``, whose shapes depend on the data,
        it is ``[B, T]``.

        Raises:
            NotImplementedError: for asynchronous collectors.
        """
        shape = self._source.shape
        if shape is None:
            raise NotImplementedError(
                f"{type(self).__name__} does not know its batches before the first: "
                "use collector.next().clone().zero_()."
            )
        return self._delivery.blank(*shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new collector resumes exactly.

        It has episode numbers, the actions of running episodes, random generators,
        weights and counters. A ``Collector`` has it after ``shutdown`` too.

        Raises:
            ClosedError: the collector is closed, and its state was in its workers, or
                it was interrupted within a batch.
        """
        with self._asking(closed=self._source.keeps_state and not self._error):
            return pack(self._source) | {
                "trajectories": self._delivery.state(),
                "numbering": self._options.numbering,
                "level": self._level,
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the ``state_dict`` of a collector with the same arguments.

        Running episodes are replayed. An environment begins its next episode instead,
        with a warning, if it cannot repeat episodes, if the episode has more than 64 MB
        of actions, or if the replay leads to other observations than recorded.
        ``stats()["cut_trajectories"]`` lists the trajectories that were cut.

        Raises:
            KeyError: if the mapping is not the state of a collector; nothing changes.
            ValueError: if ranks, workers, environments or weights differ, or if only
                one of the two collectors has ``trajs_per_batch``, or a ``curriculum``,
                or if trajectories have other keys; nothing changes.
        """
        with self._asking():
            numbering = self._options.numbering
            states = unpack(state_dict, self._source, numbering, self._level)
            self._delivery.check(state_dict["trajectories"], self._source.shape)
            self._level = state_dict["level"]
            if self._level is not None:
                self._source.set_level(self._level)
            self._source.load(states)
            restore(state_dict, self._source)
            self._delivery.load(state_dict["trajectories"])
            # Frames of earlier runs count as steps.
            missing = self.frames - self._source.steps() - self._steps_before
            self._steps_before += max(0, missing)

    def steps_so_far(self) -> int:
        """Return the frames stepped so far, including batches in progress.

        It never falls: frames that a failed worker stepped in vain are included.
        """
        return self._steps_before + self._source.steps()

    def explain(self) -> list[str]:
        """Say, for each worker, which path its policy took in its last batch, and why.

        Before a worker's first batch it says what the next one begins with.
        """
        return self._source.explain()

    def getattr_env(self, name: str) -> list[Any]:
        """Return attribute ``name`` of every worker's environments."""
        with self._asking():
            return self._source.attribute("env", name)

    def call_env(
        self,
        name: str,
        /,
        *args: Any,
        environments: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method of the environments, between two batches.

        It acts from the next batch on, but not in batches that workers are collecting
        already, with ``prefetch`` and in a ``MultiAsyncCollector``: there it acts from
        the batch after that one.

        The call is part of ``state_dict``. A collector that loads the state makes it
        again, before the same frame of a running episode, and so does a worker that
        replaces another one. So the method should set what it changes: calling it once
        more must not matter. Nothing undoes it: neither an earlier state that the same
        collector loads, nor a ``reset`` of some environments while batches are
        collected ahead. Right after loading a state no batch is being collected yet,
        so a call acts from the next batch on in every collector.

        Args:
            name: of the method.
            args: its arguments: numbers, strings, None, and lists, tuples and dicts of
                them.
            environments: rows of a batch of all environments; None for all. The worlds
                of a ``BatchedEnv`` share one simulator, so they are called together.
            kwargs: its keyword arguments, like ``args``.

        Returns:
            What the method returned in each environment, or in each simulator, in the
            order of the environments.

        Raises:
            AttributeError: the environments do not have the method, or it steps them.
            IndexError: there is no such environment.
            TypeError: the name, an argument or an index is of another kind.
            ValueError: only some worlds of a simulator are chosen. Environments of
                other workers may have been called.
            Exception: what the method raised. It was called in the other environments,
                and the collector stays usable.
        """
        require("name", name, str, Option(""))
        check_name(type(self).__name__, name, "The collector resets and steps them.")
        with self._asking():
            rows = listed_environments(environments, sum(self._source.sizes))
            call = EnvCall(rows, name, plain(args), plain(kwargs))
            return self._source.call_env(call) if rows else []

    @property
    def level(self) -> int | None:
        """The curriculum's level for the next batches; None without a curriculum."""
        return self._level

    def set_level(self, level: int) -> None:
        """Set the level with which ``curriculum`` is called from the next batch on.

        It acts on episodes that begin in batches that workers do not collect yet, like
        an update of weights; running episodes keep their tasks. ``("collector",
        "level")`` is the level of each frame's episode. ``state_dict`` has the level.

        Args:
            level: an integer of at least 0.

        Raises:
            TypeError: it is no integer.
            ValueError: it is negative, or the collector has no ``curriculum``.
        """
        level = require("level", level, int, LEVEL)
        if self._level is None:
            raise ValueError(
                "set_level() needs a curriculum: build the collector with "
                "curriculum=function, which returns the task for a level."
            )
        with self._asking():
            self._level = level
            self._source.set_level(level)

    def getattr_policy(self, name: str) -> Any:
        """Return attribute ``name`` of the trainer's policy, or else of worker 0's."""
        if self._policy.module is not None:
            return getattr(self._policy.module, name)
        with self._asking():
            return self._source.attribute("policy", name)[0]

    def getattr_rb(self, name: str) -> Any:
        """Return attribute ``name`` of the replay buffer."""
        return getattr(self._options.replay_buffer, name)

    # Ending

    def shutdown(
        self, timeout: float | None = CLOSE_SECONDS, *, close_env: bool = True
    ) -> None:
        """End the workers and release memory, within ``timeout`` seconds.

        It may be called twice, from any thread, and in a signal handler. Batches that
        are held stay valid.

        Args:
            timeout: None means 10 seconds.
            close_env: as in TorchRL, but only True is possible.

        Raises:
            ValueError: if ``close_env`` is False, because the collector owns its
                environments and closes them.
        """
        if not close_env:
            raise ValueError(
                "close_env=False is not possible: a collector builds its environments "
                "from factories, and closes them."
            )
        if not self._closed:
            self._closed = True
            self._stopping.set()
            self._source.close(CLOSE_SECONDS if timeout is None else timeout)

    def __enter__(self) -> Self:
        """Return the collector; leaving the block shuts it down."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        """Shut down; soon if the block has raised an error."""
        if error is None:
            self.shutdown()
        else:
            close_after(error, self.shutdown)

    if not TYPE_CHECKING:  # It raises: editors shall report a name that is missing.

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the replacement of TorchRL's attribute."""
            if hasattr(type(self), name):
                # A property raised an AttributeError: raise it again, it is the cause.
                return object.__getattribute__(self, name)
            advice = TORCHRL_ATTRIBUTES.get(name)
            raise missing_attribute(type(self).__name__, name, advice)

    def __del__(self) -> None:
        """Shut down a collector that was not closed."""
        self.shutdown()

    def __repr__(self) -> str:
        """Return workers, batch shape, version and frames, from local state only."""
        name = type(self).__name__
        if "_statistics" not in vars(self):
            return f"{name}(not started)"
        state = ", closed" if self._closed else ""
        return (
            f"{name}({self._source.outline()}, version {self.policy_version}, "
            f"{self.frames:,} frames{state})"
        )

    def _repr_html_(self) -> str:
        """Show ``stats()`` as a table in notebooks."""
        return statistics(type(self).__name__, self.stats())

    def _run(self) -> None:
        """Collect in the thread of ``start``."""
        while not self._stopping.is_set():
            with self._turn:
                pass
            try:
                if not self._advance():
                    return
            except Exception:  # noqa: BLE001 - stored, and raised by the next call
                return

    def _advance(self) -> list[Any]:
        """Return the next batch in a list; an empty one at the end."""
        self._check_owner()
        with self._lock:
            with self._ending_on(BaseException):
                batches = self._delivery.more()
            if not batches and not self._finished():
                self._check_open()
            with self._ending_on(BaseException):
                if not batches and not self._finished():
                    self._update_if_due()
                while not batches and not self._finished():
                    batches = self._collect_more()
                return batches or self._delivery.rest()

    @contextmanager
    def _asking(self, *, closed: bool = False) -> Iterator[None]:
        """Hold the workers exclusively; an interruption shuts the collector down.

        Otherwise an unread reply would be taken for the reply to the next command.

        Args:
            closed: whether a collector that is closed will do too.
        """
        with self.pause():
            if closed:
                self._check_owner()
            else:
                self._check_open()
            with self._ending_on(KeyboardInterrupt, SystemExit):
                yield

    @contextmanager
    def _ending_on(self, *kinds: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            if self._closed and isinstance(error, Exception):
                self._check_open()  # Another thread has shut down; this follows.
            self._error = error
            close_after(error, self.shutdown)
            raise

    def _collect_more(self) -> list[Any]:
        """Collect one slot; return the batch that it completes, if any, in a list."""
        started = time.perf_counter()
        self._weights.warn_if_stale()
        delivered = self._statistics.frames
        filled = self._source.fill(
            random=self._options.random_after(delivered), delivered=delivered
        )
        if self._closed:  # By another thread: workers have stopped within the batch.
            self._check_open()
        seconds = time.perf_counter() - started
        self._statistics.add(filled.frames, filled.episodes, seconds)
        self._policy.played(filled.episodes)
        return self._delivery.batches(filled)

    def _update_if_due(self) -> None:
        """Publish the weights before a batch, with ``update_at_each_batch``.

        A batch of whole trajectories may need several slots, which share a version.
        """
        if self._options.update_at_each_batch and self._weights.can_update:
            tensors = self._policy.tensors()  # Weights elsewhere are an error at once.
            if self._statistics.batches or not self._policy.is_published:
                self._weights.publish((tensors, None))

    def _finished(self) -> bool:
        return self._options.completed(self._statistics.frames)

    def _check_owner(self) -> None:
        if not self._source.works_in_forks:
            refuse_in_forks(self._owner, type(self).__name__)

    def _check_open(self) -> None:
        self._check_owner()
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            raise ClosedError(
                "This collector was closed by Ctrl-C, or by another interruption, "
                "within a batch or a command, and its state is lost. Build a new one; "
                "save state_dict() between batches to resume from there."
            )
        if self._closed:
            raise ClosedError("This collector was shut down. Build a new one.")
