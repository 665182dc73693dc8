"""Shared flags by which the trainer sends commands and workers report completion.

    cell                writer    meaning
    commands[g][p]      trainer   process p's latest command for group g: a number
                                  that is new each time, and an operation in its
                                  two lowest bits
    finished[g][p]      worker p  the latest command that it has finished
    failed[p]           worker p  it ends with an exception
    go[p]               trainer   semaphore: posted for every command of p, and for
                                  messages on its socket
    done[g]             workers   semaphore: posted when a command of g is done

A group is done when ``finished[g] == commands[g]``. The last worker to finish sees that
and posts, so the trainer wakes once per step for any number of processes. Workers write
first and compare afterwards, with a fence in between. If two finish at the same time,
at least one sees that the group is done. If both do, the trainer checks once more.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, Literal, final

from marl_collect.parallel_env.semaphore import NBYTES, Semaphore
from marl_collect.processes.shared_memory import Segment
from marl_collect.processes.status_board import fence

_LINE: Final = 64
_BITS: Final = 2
_NUMBERS: Final = 1 << 32 - _BITS
_SIZES: Final = {"B": 1, "I": 4, "q": 8}
_Code = Literal["B", "I", "q"]


class EnvOperation(IntEnum):
    """What a worker does with its environments of one group."""

    STEP = 0
    STEP_CHOSEN = 1
    RESET_CHOSEN = 2


def operation_of(command: int) -> int:
    """Return the ``EnvOperation`` in a command."""
    return command & (1 << _BITS) - 1


@final
class Signals:
    """The flags, for the trainer and the workers.

    Attributes:
        chosen: uint8 ``[environments]``: whom a partial command means.
        seeds: int64 ``[environments]``: of episodes that are to begin.
        failed: uint8 ``[processes]``.
        awaited: whether each group's latest command has yet to be waited for.
    """

    def __init__(
        self, segment: Segment, sizes: tuple[int, int, int], spin: float, *, fresh: bool
    ) -> None:
        """Place the flags in ``segment``, which the caller owns.

        Args:
            segment: at least ``nbytes`` large.
            sizes: numbers of processes, groups and environments.
            spin: seconds to spin before sleeping; see ``Semaphore.wait``.
            fresh: whether to initialise the semaphores.
        """
        p, g, environments = sizes
        groups = range(g)
        self._spin = spin
        self._view = memoryview(segment.buffer)
        self._end = 0
        self._go = [self._semaphore(segment, fresh=fresh) for _ in range(p)]
        self._done = [self._semaphore(segment, fresh=fresh) for _ in groups]
        self.failed = self._array(p, "B")
        self._commands = [self._array(p, "I") for _ in groups]
        self._finished = [self._array(p, "I") for _ in groups]
        self.chosen = self._array(environments, "B")
        self.seeds = self._array(environments, "q")
        self._number = 0
        self.awaited = [False for _ in groups]

    @staticmethod
    def nbytes(processes: int, groups: int, environments: int) -> int:
        """Return an upper bound of the memory that the flags need."""
        flags = (1 + groups * (4 + 4)) * processes + 9 * environments
        return flags + (3 + 2 * groups) * _LINE + (processes + groups) * NBYTES

    # The trainer's side

    def command(
        self, group: int, operation: EnvOperation, processes: Iterable[int]
    ) -> None:
        """Send a command to some processes, for a group that is not ``awaited``."""
        commands, go = self._commands[group], self._go
        self._number = number = (self._number + 1) % _NUMBERS
        self.awaited[group] = True
        for p in processes:
            commands[p] = number << _BITS | operation
        for p in processes:
            go[p].post()

    def sleep(self, group: int, seconds: float) -> bool:
        """Spin, then sleep, until a group posts; return whether it is done."""
        self._done[group].wait(seconds)
        if not self.done(group):
            return False
        self.awaited[group] = False
        return True

    def done(self, group: int) -> bool:
        """Return whether every process has finished its latest command of a group."""
        return self._finished[group].tobytes() == self._commands[group].tobytes()

    def pending(self, group: int) -> list[int]:
        """Return the processes that have not finished."""
        pairs = zip(self._finished[group], self._commands[group], strict=True)
        return [p for p, (finished, command) in enumerate(pairs) if finished != command]

    def wake(self, processes: Iterable[int]) -> None:
        """Wake some workers, which look for commands and messages."""
        for p in processes:
            self._go[p].post()

    # A worker's side

    def listen(self, process: int, seconds: float) -> bool:
        """Spin, then sleep, until ``process`` is called; return whether it was."""
        return self._go[process].wait(seconds)

    def pending_command(self, group: int, process: int) -> int | None:
        """Return the command that ``process`` has not finished, if there is one."""
        command = self._commands[group][process]
        return None if command == self._finished[group][process] else command

    def finish(self, group: int, process: int, command: int) -> None:
        """Mark a command as finished, and wake the trainer if it was the last."""
        fence()
        self._finished[group][process] = command
        fence()
        if self.done(group):
            self._done[group].post()

    def fail(self, process: int) -> None:
        """Report that ``process`` fails, and wake the trainer for all groups."""
        self.failed[process] = 1
        for done in self._done:
            done.post()

    def _array(self, count: int, code: _Code) -> "memoryview[int]":
        first = self._reserve(count * _SIZES[code])
        return self._view[first : first + count * _SIZES[code]].cast(code)

    def _semaphore(self, segment: Segment, *, fresh: bool) -> Semaphore:
        offset, spin = self._reserve(NBYTES), self._spin
        return Semaphore(segment.buffer, offset, fresh=fresh, spin=spin)

    def _reserve(self, size: int) -> int:
        first = self._end
        self._end = first + -(-size // _LINE) * _LINE
        return first
