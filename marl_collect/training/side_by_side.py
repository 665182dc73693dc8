"""Runs of a comparison side by side, each in a process that trains one at a time."""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from marl_collect.errors import WorkerError
from marl_collect.processes.context import Attempt, WorkerContext, attempt, result
from marl_collect.processes.launcher import COLLECTOR_MODULES
from marl_collect.processes.pool import WorkerPool
from marl_collect.programs.interruption import Interruption
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.options import Setup
from marl_collect.training.trainer import Watcher

Run = tuple[Setup, int]
"""Setup and seed of a run."""
Train = Callable[[Run, Watcher, Interruption], None]
"""Trains a run to its end."""


@final
@dataclass(frozen=True)
class _Ended:
    """The end of a run.

    Attributes:
        reply: what the run raised, or its pickled result, which is None.
        interrupted: whether a signal ended it.
    """

    reply: Attempt
    interrupted: bool


@final
class _Teller(Watcher):
    """Sends the calls of a run's watcher to the command: method and arguments."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    @override
    def progress(self, frames: int, row: dict[str, float]) -> None:
        self._context.send(("progress", (frames, row)))

    @override
    def evaluated(self, record: EvaluationRecord) -> None:
        self._context.send(("evaluated", (record,)))


def train_side_by_side(
    train: Train,
    runs: list[Run],
    jobs: int,
    begin: Callable[[Setup, int], Watcher],
    ended: Callable[[], None],
    interruption: Interruption,
) -> int:
    """Train runs in several processes, a run at a time in each.

    A run that fails, or whose process dies, does not stop the others. A signal is
    passed on to all processes, which save their runs after the batch in progress; a
    second signal ends them at once.

    Args:
        train: pickled with cloudpickle.
        runs: in the order in which they begin.
        jobs: number of processes.
        begin: returns the watcher of a run.
        ended: called after each run that is finished.
        interruption: of the command.

    Returns:
        The number of runs that failed.

    Raises:
        KeyboardInterrupt: after a signal, when all runs are saved.
    """
    arguments = [train] * min(jobs, len(runs))
    # A run that evaluates or computes tells nothing for long: there is no limit.
    limits: Any = {"timeout": None, "start_timeout": None}
    with WorkerPool(
        _main, arguments, preload=COLLECTOR_MODULES, name="marl-run", **limits
    ) as pool:
        side_by_side = _SideBySide(pool, train, runs, begin, ended, interruption)
        with interruption.deferred(side_by_side.stop):
            side_by_side.train_all()
    interruption.raise_if_happened()
    return side_by_side.failed


@final
class _SideBySide:
    """The command's end of the processes."""

    def __init__(
        self,
        pool: WorkerPool,
        train: Train,
        runs: list[Run],
        begin: Callable[[Setup, int], Watcher],
        ended: Callable[[], None],
        interruption: Interruption,
    ) -> None:
        self._pool = pool
        self._train = train
        self._waiting = deque(runs)
        self._begin = begin
        self._ended = ended
        self._interruption = interruption
        self._watchers: dict[int, Watcher] = {}
        """Of the runs that train, by the worker that trains them."""
        self.failed = 0

    def train_all(self) -> None:
        """Train all runs, or until a signal has ended those that train."""
        for worker in range(len(self._pool)):
            self._start(worker)
        while self._watchers:
            for worker, message in self._next_message():
                if isinstance(message, tuple):
                    method, arguments = message
                    getattr(self._watchers[worker], method)(*arguments)
                else:
                    self._end(worker, message)

    def stop(self) -> None:
        """Have all processes save their runs and end; called by a signal handler."""
        for pid in self._pool.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for watcher in list(self._watchers.values())[:1]:
            watcher.interrupted()

    def _start(self, worker: int) -> None:
        if self._waiting and not self._interruption.happened:
            run = self._waiting.popleft()
            self._watchers[worker] = self._begin(*run)
            self._pool.send(worker, run)

    def _next_message(self) -> Iterator[tuple[int, Any]]:
        """Yield the next message of a worker that trains, or why it died."""
        for worker in list(self._watchers):
            if self._pool.poll([worker]):
                try:
                    yield self._pool.receive([worker])
                except Exception as error:  # noqa: BLE001 - the run has failed
                    yield worker, error
                return
        self._pool.poll(list(self._watchers), wait=1.0)

    def _end(self, worker: int, end: Exception | _Ended) -> None:
        """Tell a run's watcher how it ended, and begin another one."""
        watcher = self._watchers.pop(worker)
        error = _error_of(end, worker)
        stopped = self._interruption.happened
        if error is None:
            watcher.finished()
            self._ended()
        elif not stopped:
            watcher.failed(error)
            self.failed += 1
        has_died = isinstance(end, Exception) or end.interrupted
        if has_died and self._waiting and not stopped:
            self._pool.restart(worker, self._train)
        self._start(worker)


def _error_of(end: Exception | _Ended, worker: int) -> Exception | None:
    """Return why a run failed, with the type of its exception; None if it did not."""
    if isinstance(end, Exception):
        return end
    if end.interrupted:
        return WorkerError(worker, "was terminated by a signal")
    try:
        result(end.reply, worker)
    except Exception as error:  # noqa: BLE001 - the watcher is told
        return error
    return None


def _main(context: WorkerContext, train: Train) -> None:
    """Train the runs that the command sends, until it closes the pool."""
    with _terminated() as interruption:
        while not interruption.happened:
            run = context.receive()
            reply: Attempt = b"", None
            try:
                reply = attempt(train, run, _Teller(context), interruption)
            except KeyboardInterrupt:
                if not interruption.happened:
                    raise
            context.send(_Ended(reply, interruption.happened))


@contextmanager
def _terminated() -> Iterator[Interruption]:
    """Handle SIGTERM, and ignore SIGINT.

    A terminal sends SIGINT to the command too, which passes it on as SIGTERM. Both
    would count as two signals if the machine is slow.
    """
    with Interruption() as interruption:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield interruption
