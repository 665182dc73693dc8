"""Starts the processes of ParallelEnv, waits for them, and ends them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, final

from marl_collect.buffers.layout import Layout
from marl_collect.core.batch import consecutive
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, check_alike
from marl_collect.errors import ClosedError, WorkerError, warn
from marl_collect.parallel_env import worker
from marl_collect.parallel_env.options import ParallelOptions, spin_seconds
from marl_collect.parallel_env.signals import Signals
from marl_collect.processes import cleanup
from marl_collect.processes.closing import CLOSE_SECONDS, ERROR_CLOSE_SECONDS
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.shared_memory import Segment
from marl_collect.processes.status_board import STOP

_CHECK_SECONDS: Final = 0.1
"""Interval of the trainer's checks that processes are alive while it waits."""

_NUDGE_SECONDS: Final = 1.0
"""How long the trainer waits before it sends a message that a hung process ignores."""


def spread_rows(environments: int, processes: int, groups: int) -> list[list[range]]:
    """Say which rows of each group each process steps, ``rows[group][process]``.

    Rows are environments, in order. A group is a contiguous range, so that a policy can
    act on it in place. Each process steps a part of every group, which may be empty, so
    that no process is idle while the policy acts for another group. The loads of two
    processes differ by at most one environment.
    """
    rows: list[list[range]] = []
    first = 0  # The process that gets the next spare environment.
    for start, end in pairwise(environments * g // groups for g in range(groups + 1)):
        share, spare = divmod(end - start, processes)
        sizes = [share + ((p - first) % processes < spare) for p in range(processes)]
        rows.append(consecutive(sizes, start))
        first = (first + spare) % processes
    return rows


@final
class EnvProcesses:
    """Processes with their environments, and their shared memory.

    Attributes:
        pool: of the processes.
        rows: that each process steps; see ``spread_rows``.
        description: of the environments.
        arrays: the environments' memory, ``[N, ...]`` per key.
        signals: the flags.
    """

    def __init__(self, factories: Sequence[Factory], options: ParallelOptions) -> None:
        """Start the processes and wait until they are ready for the first reset."""
        size = len(factories)
        processes = options.processes
        self.rows = spread_rows(size, processes, options.groups)
        self._segments: list[Segment] = []
        self._calls = 0
        self._check_seconds = min(_CHECK_SECONDS, (options.timeout or 1.0) / 10)
        self.pool = WorkerPool(
            worker.main,
            [self._assignment(p, factories, options) for p in range(processes)],
            name="marl-env",
            **options.of_pool(worker.__name__),
        )
        with self._ending_on(BaseException):
            self.description = self._descriptions()
            self._share(size, spin_seconds(processes))

    def check_open(self) -> None:
        """Raise an error if the processes cannot be used; see ``WorkerPool``."""
        if self.pool.closed and not cleanup.ends_with_the_process():
            raise ClosedError(
                "This ParallelEnv is closed: an error or close() has ended its "
                "processes. Build a new one."
            )
        self.pool.check_open()

    def wait(self, group: int) -> None:
        """Wait until a group has finished its latest command.

        Raises:
            Exception: what a process raised, from a ``WorkerError``. All are ended.
            WorkerError: a process died or hung. All are ended.
        """
        signals = self.signals
        if not signals.awaited[group] or signals.sleep(group, self._check_seconds):
            return
        start, nudged = time.monotonic(), False
        with self._ending_on(Exception):
            while True:
                failed = [p for p, fails in enumerate(signals.failed) if fails]
                if failed:
                    self.pool.receive(failed)  # Raises what the first of them raised.
                self.pool.check()  # That all are alive, and none hangs.
                if not nudged and time.monotonic() - start > _NUDGE_SECONDS:
                    nudged = True
                    self.pool.broadcast(None, signals.pending(group))
                if signals.sleep(group, self._check_seconds):
                    return

    def call_on_each(self, arguments: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Let some processes call a function on their environments.

        Args:
            arguments: of each process: rows, the function and its further arguments.

        Returns:
            The results of each process, or what the function raised there.

        Raises:
            Exception: as ``wait``.
        """
        self._calls += 1
        number, replies = self._calls, dict[int, Any]()
        with self._ending_on(Exception):
            self.pool.send_each(
                {k: ("call_on_each", (number, *arguments[k])) for k in arguments}
            )
            self.signals.wake(arguments)
            while len(replies) < len(arguments):
                process, (number_of_reply, reply) = self.pool.receive(
                    arguments.keys() - replies.keys()
                )
                if number_of_reply == number:  # Else Ctrl-C ended the call.
                    replies[process] = reply
        return {process: replies[process] for process in arguments}

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End all processes and release the memory; may be called twice."""
        for failure in self._end(timeout):
            warn(f"While closing: {failure}", RuntimeWarning)

    def _end(self, timeout: float) -> tuple[WorkerError, ...]:
        """Close, and return the errors that processes raised meanwhile."""
        if self.pool.foreign:  # They belong to the process that started them.
            return ()
        failures: tuple[WorkerError, ...] = ()
        if not self.pool.closed:
            for line in self.pool.status_board.lines:
                line.cells[STOP] = 1
            if hasattr(self, "signals"):
                self.signals.wake(range(len(self.pool)))
            failures = self.pool.close(timeout)
        for segment in self._segments:
            segment.close()
        return failures

    @contextmanager
    def _ending_on(self, error: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except error:
            self._end(ERROR_CLOSE_SECONDS)
            raise

    def _assignment(
        self, process: int, factories: Sequence[Factory], options: ParallelOptions
    ) -> worker.EnvAssignment:
        rows = tuple(group[process] for group in self.rows)
        of_process = tuple(factories[k] for part in rows for k in part)
        threads = options.num_sub_threads
        pins = options.pin_processes and threads == 1
        return worker.EnvAssignment(rows, of_process, threads, pins)

    def _receive_all(self) -> list[Any]:
        """Return the next message of every process."""
        return [self.pool.receive([p])[1] for p in range(len(self.pool))]

    def _descriptions(self) -> EnvDescription:
        descriptions: list[EnvDescription] = self._receive_all()
        for process, description in enumerate(descriptions):
            who = f"the environments of process {process}"
            check_alike(descriptions[0], description, who, "those of process 0")
        return descriptions[0]

    def _share(self, size: int, spin: float) -> None:
        layout = Layout.plan(self.description.row(), (size, 1))
        memory = Segment.create(layout.nbytes, "The memory of ParallelEnv")
        self._segments.append(memory)
        sizes = len(self.pool), len(self.rows), size
        flags = Segment.create(Signals.nbytes(*sizes), "ParallelEnv")
        self._segments.append(flags)
        self.signals = Signals(flags, sizes, spin, fresh=True)
        handles = (memory.handle, layout, flags.handle, sizes, spin)
        self.pool.broadcast(("attach", handles))
        self._receive_all()
        arrays = layout.arrays(memory.buffer)
        self.arrays = {key: array[:, 0] for key, array in arrays.items()}
