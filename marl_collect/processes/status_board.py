"""The status board: one line of shared memory per worker, with its current state.

A worker writes to its line from its hot loop, through a plain memoryview of int64
(about 0.1 us per write, no lock). The trainer reads it at any time to find workers that
hang, to report where one died, and to draw the progress bar:

    cells = worker.line.cells
    cells[PHASE] = Phase.STEP       # int, once per change
    cells[STEPS] = steps            # once per step

Each cell has one writer. A line is 128 bytes, two cache lines, so that no two workers
write to the same cache line.
"""

import threading
from enum import IntEnum
from typing import Final

from marl_collect.processes.shared_memory import MemoryHandle, Segment

LINE_BYTES: Final = 128
CELLS: Final = LINE_BYTES // 8

# Indices of the cells in a line. Written by the worker:
PHASE: Final = 0  # a Phase
STEPS: Final = 1  # steps of rollouts, kept when the worker is replaced
ENVIRONMENT: Final = 2  # current environment, counted over all workers, plus 1
MESSAGES_READ: Final = 3  # messages received; kept by WorkerContext.receive
WEIGHTS_READ: Final = 4  # number of the order whose weights the worker has read
REPLAYED: Final = 5  # replayed steps; they are progress, but no steps of a rollout
# Written by the trainer:
STOP: Final = 14  # not 0: stop as soon as possible
PREEMPT: Final = 15  # not 0: finish the rollout early


_LOCK: Final = threading.Lock()


def fence() -> None:
    """Prevent loads and stores from moving across this call.

    Taking a lock is an atomic read-modify-write, which is a full barrier on x86. On ARM
    it is nearly one. A wake-up of ParallelEnv that is missed there costs one polling
    interval.
    """
    with _LOCK:
        pass


class Phase(IntEnum):
    """What a worker is doing. In ``IDLE`` it waits for a message, else it works.

    ``COMMAND`` is work on a message that has no phase of its own.
    """

    START = 0
    CREATE = 1
    RESET = 2
    STEP = 3
    POLICY = 4
    IDLE = 5
    CLOSE = 6
    COMMAND = 7

    @property
    def label(self) -> str:
        """The name in error messages."""
        return self.name.lower()


class Line:
    """One worker's line, for the worker and the trainer."""

    def __init__(self, cells: memoryview) -> None:
        self.cells = cells
        """int64 ``[16]``, shared; write to it with the indices of this module."""

    def enter(self, phase: Phase, environment: int | None = None) -> None:
        """Write the phase and, if there is one, the environment's index."""
        self.cells[ENVIRONMENT] = 0 if environment is None else environment + 1
        self.cells[PHASE] = int(phase)

    @property
    def phase(self) -> Phase:
        """What the worker is doing."""
        return Phase(self.cells[PHASE])

    @property
    def environment(self) -> int | None:
        """Index of its environment over all workers; None if none."""
        number = self.cells[ENVIRONMENT]
        return number - 1 if number else None

    def clear(self) -> None:
        """Reset the line for a replacement: ``Phase.START``; steps are kept."""
        for index in range(CELLS):
            if index != STEPS:
                self.cells[index] = 0


class StatusBoard:
    """The lines of all workers of a pool; owned by the process that created it."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.handle = segment.handle
        """Argument of ``attach`` in another process; can be pickled."""
        cells = memoryview(segment.buffer).cast("q")
        count = len(cells) // CELLS
        self.lines = tuple(
            Line(cells[i * CELLS : (i + 1) * CELLS]) for i in range(count)
        )

    @classmethod
    def create(cls, workers: int) -> "StatusBoard":
        """Make an empty status board with a line per worker."""
        return cls(Segment.create(workers * LINE_BYTES, "The status board of a pool"))

    @classmethod
    def attach(cls, handle: MemoryHandle) -> "StatusBoard":
        """Map a status board that another process created."""
        return cls(Segment.attach(handle))

    def close(self) -> None:
        """Release the memory; lines that are still referenced stay readable."""
        self._segment.close()
