"""Shared flags by which trainer and workers tell each other what to do, and done.

    cell                writer    meaning
    ring                trainer   grows with every publication; workers sleep on it
    commands[g][p]      trainer   process p's latest command for group g: a number
                                  that is new each time, and an operation in its
                                  two lowest bits
    finished[g][p]      worker p  the latest command that it has done
    asleep[p]           worker p  it sleeps on the ring, or is about to
    failed[p]           worker p  it leaves with an exception
    trainer_asleep      both      set by the trainer, cleared by whoever wakes it

A group is done when ``finished[g] == commands[g]``; its last finisher sees that and
wakes the trainer, so there is one wake-up per step however many processes there
are. Who goes to sleep says so first and looks once more after that, and who has
news writes it first and looks for sleepers after that: with a fence between the two
on both sides, one of them sees the other.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal, final

from marl_collect.memory import Segment
from marl_collect.parallel_env.futex import fence, word

_LINE: Final = 64
_WRAP: Final = 0xFFFFFFFF
_BITS: Final = 2
_TRAINER: Final = 1
_SIZES: Final = {"B": 1, "I": 4, "q": 8}
_Code = Literal["B", "I", "q"]


class Operation(IntEnum):
    """What a worker is told to do with its environments of one group."""

    STEP = 0
    STEP_CHOSEN = 1
    RESET_CHOSEN = 2
    MESSAGE = 3


def operation_of(command: int) -> int:
    """Return the `Operation` in a command."""
    return command & (1 << _BITS) - 1


@dataclass(frozen=True)
class SignalsShape:
    """How many of everything there are.

    Attributes:
        processes: workers.
        groups: of environments that are stepped together.
        environments: over all groups and processes.
        spin: seconds to look again and again before going to sleep.
    """

    processes: int
    groups: int
    environments: int
    spin: float

    @property
    def control(self) -> int:
        """Index of the extra group whose commands are messages."""
        return self.groups


@final
class Signals:
    """The flags, seen from either side.

    Attributes:
        shape: how many of everything there are.
        chosen: uint8 ``[environments]``: whom a partial command means.
        seeds: int64 ``[environments]``: of episodes that are to begin.
        failed: uint8 ``[processes]``.
    """

    def __init__(self, segment: Segment, shape: SignalsShape) -> None:
        """Lay the flags out in ``segment``, which the caller owns."""
        self.shape = shape
        self._view = memoryview(segment.buffer)
        self._end = 0
        p, rows = shape.processes, range(shape.groups + 1)
        ring_at, self._ring = self._place(1, "I")
        trainer_at, self._trainer_asleep = self._place(1, "I")
        _, self._asleep = self._place(p, "B")
        _, self.failed = self._place(p, "B")
        self._commands = [self._place(p, "I")[1] for _ in rows]
        self._finished = [self._place(p, "I")[1] for _ in rows]
        _, self.chosen = self._place(shape.environments, "B")
        _, self.seeds = self._place(shape.environments, "q")
        self._bell = word(segment.buffer, ring_at)
        self._trainer = word(segment.buffer, trainer_at)
        self._everybody_awake = bytes(p)

    @staticmethod
    def nbytes(shape: SignalsShape) -> int:
        """Return how much memory the flags take, at most."""
        rows = shape.groups + 1
        per_process = 2 + rows * (4 + 4)
        arrays = 6 + 2 * rows
        return arrays * _LINE + per_process * shape.processes + 9 * shape.environments

    # The trainer's side

    def publish(
        self, group: int, operation: Operation, processes: Iterable[int]
    ) -> None:
        """Give some processes a command for a group; `ring` must follow."""
        commands = self._commands[group]
        command = ((self._ring[0] + 1) << _BITS | operation) & _WRAP
        fence()
        for p in processes:
            commands[p] = command

    def ring(self, mask: int = _WRAP) -> None:
        """Tell the processes with a bit of ``mask`` that there are commands."""
        self._ring[0] = (self._ring[0] + 1) & _WRAP
        fence()
        if self._asleep.tobytes() != self._everybody_awake:
            self._bell.wake(mask)

    def done(self, group: int) -> bool:
        """Return whether every process has done its latest command for ``group``."""
        return self._finished[group].tobytes() == self._commands[group].tobytes()

    def pending(self, group: int) -> list[int]:
        """Return the processes that have not."""
        pairs = zip(self._finished[group], self._commands[group], strict=True)
        return [p for p, (finished, command) in enumerate(pairs) if finished != command]

    def spin(self, group: int) -> bool:
        """Look again and again for a moment; return whether the group is done."""
        if self.shape.spin == 0.0:
            return self.done(group)
        end = time.perf_counter() + self.shape.spin
        while not self.done(group):
            if time.perf_counter() > end:
                return False
            os.sched_yield()
        return True

    def sleep(self, group: int, seconds: float) -> bool:
        """Sleep until the last finisher wakes us; return whether the group is done."""
        self._trainer_asleep[0] = 1
        fence()
        if not self.done(group) and not any(self.failed):
            self._trainer.sleep(1, seconds, _TRAINER)
        self._trainer_asleep[0] = 0
        return self.done(group)

    # A worker's side

    @property
    def rung(self) -> int:
        """What to pass to `listen`, read before looking for commands."""
        return self._ring[0]

    def command(self, group: int, process: int) -> int | None:
        """Return the command that ``process`` still has to do, if there is one."""
        command = self._commands[group][process]
        if command == self._finished[group][process]:
            return None
        fence()
        return command

    def finish(self, group: int, process: int, command: int) -> None:
        """Say that a command is done, and wake the trainer if it was the last."""
        fence()
        self._finished[group][process] = command
        fence()
        if self._trainer_asleep[0] and self.done(group):
            self.wake_trainer()

    def wake_trainer(self) -> None:
        """Have the trainer look at the flags."""
        self._trainer_asleep[0] = 0
        self._trainer.wake(_TRAINER)

    def listen(self, process: int, rung: int, seconds: float) -> None:
        """Spin, then sleep, until the ring is no longer ``rung``."""
        ring = self._ring
        if self.shape.spin:
            end = time.perf_counter() + self.shape.spin
            while ring[0] == rung and time.perf_counter() <= end:
                os.sched_yield()
        if ring[0] != rung:
            return
        self._asleep[process] = 1
        fence()
        if ring[0] == rung:
            self._bell.sleep(rung, seconds, mask_of(process))
        self._asleep[process] = 0

    def _place(self, count: int, code: _Code) -> "tuple[int, memoryview[int]]":
        begin, size = self._end, count * _SIZES[code]
        self._end = begin + -(-size // _LINE) * _LINE
        return begin, self._view[begin : begin + size].cast(code)


def mask_of(process: int) -> int:
    """Return the bit of a process, which it may share with others."""
    return 1 << (process & 31)
