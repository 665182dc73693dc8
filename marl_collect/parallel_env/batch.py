"""Environments in other processes, stepped through shared memory."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from marl_collect.core.batch import EnvBatch, Function, Indices
from marl_collect.core.description import Key, Row
from marl_collect.parallel_env.env_processes import EnvProcesses
from marl_collect.parallel_env.joint import value_of
from marl_collect.parallel_env.signals import EnvOperation
from marl_collect.processes.closing import CLOSE_SECONDS
from marl_collect.processes.context import result

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@final
class ParallelBatch(EnvBatch):
    """N environments, stepped by processes on one shared memory.

    A step uses no socket and no pickling. The trainer writes a number per process,
    wakes those that sleep, and sleeps until the last one is done.
    """

    is_async = True

    def __init__(self, processes: EnvProcesses, groups: range) -> None:
        """Step the environments of ``groups``, or all of them.

        Args:
            processes: closed with this batch.
            groups: consecutive ones.
        """
        self._processes = processes
        self._signals = processes.signals
        self._groups = groups
        rows_of = processes.rows
        # Of each group: its rows, and the processes that step some of them.
        self._group_rows = [range(rows[0].start, rows[-1].stop) for rows in rows_of]
        self._members = [[p for p, part in enumerate(rows) if part] for rows in rows_of]
        # Of each row.
        self._owners = [
            (g, p)
            for g, rows in enumerate(rows_of)
            for p, part in enumerate(rows)
            for _ in part
        ]
        first, last = self._group_rows[groups[0]], self._group_rows[groups[-1]]
        self._rows = range(first.start, last.stop)
        self.description = processes.description
        self.size = len(self._rows)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each process."""
        return self._processes.pool.pids

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called, or an error has closed the batch."""
        return self._processes.pool.closed

    def allocate(self) -> "dict[Key, NDArray[np.generic]]":
        """Return the memory that is shared with the processes."""
        self._processes.check_open()
        rows = slice(self._rows.start, self._rows.stop)
        return {key: array[rows] for key, array in self._processes.arrays.items()}

    def bind(self, memory: Row) -> None:
        """Check that ``memory`` is what ``allocate`` returned.

        Raises:
            ValueError: the array of a key is another one. The message names the key.
        """
        for key, shared in self.allocate().items():
            array = memory[key]
            if array.ctypes.data != shared.ctypes.data or array.shape != shared.shape:
                raise ValueError(
                    f"{'/'.join(key)} is not the memory that the processes of this "
                    "batch share. Pass the arrays that its allocate() returns."
                )

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each of ``indices``, in parallel."""
        self._processes.check_open()
        for k, seed in zip(indices, seeds, strict=True):
            self._signals.seeds[self._rows[k]] = seed
        self._command_some(EnvOperation.RESET_CHOSEN, indices)
        self.step_wait()

    @property
    def step_async(self) -> Callable[[], None]:
        """Begin a step of all environments."""
        return self._step_all

    def _step_all(self) -> None:
        self._finish_commands(self._groups)
        for group in self._groups:
            self._signals.command(group, EnvOperation.STEP, self._members[group])

    def step_wait(self) -> None:
        """Wait for the step that ``step_async`` began."""
        for group in self._groups:
            self._processes.wait(group)

    def step_some(self, indices: Sequence[int]) -> None:
        """Step the environments of ``indices``, and wait for them."""
        self._command_some(EnvOperation.STEP_CHOSEN, indices)
        self.step_wait()

    def parts(self) -> Sequence[EnvBatch]:
        """Return a batch per group."""
        if len(self._groups) == 1:
            return (self,)
        return [ParallelBatch(self._processes, range(g, g + 1)) for g in self._groups]

    def attribute(self, name: str) -> list[Any]:
        """Return an attribute of every environment."""
        return self.call_on(None, value_of, name)

    def call_on(self, indices: Indices, function: Function, *args: Any) -> list[Any]:
        """Return ``function(env, *args)`` of some environments, or all.

        An error in it does not close the batch.

        Raises:
            Exception: what the function raised, from a ``WorkerError``.
        """
        rows = self._rows if indices is None else [self._rows[k] for k in indices]
        self._finish_commands(range(len(self._members)))
        rows_of_process: dict[int, list[int]] = {}
        for row in rows:
            rows_of_process.setdefault(self._owners[row][1], []).append(row)
        replies = self._processes.call_on_each(
            {p: (r, function, args) for p, r in rows_of_process.items()}
        )
        values: dict[int, Any] = {}
        for process, reply in replies.items():
            results = result(reply, process)
            values |= zip(rows_of_process[process], results, strict=True)
        return [values[row] for row in rows]

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the processes; may be called twice."""
        self._processes.close(timeout)

    def _command_some(self, operation: EnvOperation, indices: Sequence[int]) -> None:
        """Begin ``operation`` on some environments, in all their processes at once."""
        rows = [self._rows[k] for k in indices]
        owners = {self._owners[row] for row in rows}
        groups = {group for group, _ in owners}
        self._finish_commands(groups)
        chosen = self._signals.chosen
        for group in groups:
            group_rows = self._group_rows[group]
            chosen[group_rows.start : group_rows.stop] = bytes(len(group_rows))
        for row in rows:
            chosen[row] = 1
        for group in groups:
            processes = [p for g, p in owners if g == group]
            self._signals.command(group, operation, processes)

    def _finish_commands(self, groups: Sequence[int] | set[int] | range) -> None:
        """Wait for commands of an interrupted call; raise if closed."""
        self._processes.check_open()
        for group in groups:
            self._processes.wait(group)
