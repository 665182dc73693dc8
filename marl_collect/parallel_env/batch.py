"""Environments in other processes, stepped through shared memory."""

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from marl_collect.core.description import EnvDescription, Key, Row
from marl_collect.core.env import EnvBatch
from marl_collect.core.factories import Factory
from marl_collect.errors import raise_failure
from marl_collect.parallel_env.env_processes import EnvProcesses
from marl_collect.parallel_env.messages import Ask, AskSome, EnvAnswer
from marl_collect.parallel_env.options import ParallelOptions
from marl_collect.parallel_env.signals import EnvOperation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@final
class ParallelBatch(EnvBatch):
    """N environments, stepped by processes on one shared memory.

    A step uses no socket and no pickling. The trainer writes a number per process,
    wakes those that sleep, and sleeps until the last one is done.
    """

    def __init__(self, factories: Sequence[Factory], options: ParallelOptions) -> None:
        """Start the processes and wait until the environments are built.

        Args:
            factories: one per environment.
            options: checked against the number of factories.
        """
        self._processes = EnvProcesses(factories, options)
        spread = self._processes.spread
        self._signals = self._processes.signals
        self._size = len(factories)
        self._owners = spread.owners()
        self._members = [spread.members(g) for g in range(len(spread.groups))]
        self._groups = range(len(spread.groups))
        self._chosen: list[int] = []

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of each environment."""
        return self._processes.description

    @property
    def size(self) -> int:
        """Number of environments."""
        return self._size

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each process."""
        return self._processes.pids

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called, or an error has closed the batch."""
        return self._processes.is_closed

    def allocate(self) -> "dict[Key, NDArray[np.generic]]":
        """Return the memory that is shared with the processes."""
        self._processes.check_open()
        return dict(self._processes.arrays)

    def bind(self, memory: Row) -> None:
        """Check that ``memory`` is what ``allocate`` returned.

        Raises:
            ValueError: the array of a key is another one. The message names the key.
        """
        self._processes.check_open()
        for key, own in self._processes.arrays.items():
            given = memory[key]
            if given.ctypes.data != own.ctypes.data or given.shape != own.shape:
                raise ValueError(
                    f"{'/'.join(key)} is not the memory that the processes of this "
                    "batch share. Pass the arrays that its allocate() returns."
                )

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each of ``indices``, in parallel."""
        self._processes.check_open()
        for k, seed in zip(indices, seeds, strict=True):
            self._signals.seeds[k] = seed
        self._command_some(EnvOperation.RESET_CHOSEN, indices)

    def step(self, indices: Sequence[int] | None = None) -> None:
        """Step all environments, or those of ``indices``."""
        if indices is not None:
            self._command_some(EnvOperation.STEP_CHOSEN, indices)
            return
        self.start_step()
        self.finish_step()

    def start_step(self) -> None:
        """Start a step in all processes."""
        self._settle(self._groups)
        for group in self._groups:
            self._signals.command(group, EnvOperation.STEP, self._members[group])

    def finish_step(self) -> None:
        """Wait until all processes have stepped."""
        for group in self._groups:
            self._processes.wait(group)

    def step_async(self, group: int) -> None:
        """Start a step of one group; ``step_wait`` waits for it."""
        self._settle([group])
        self._signals.command(group, EnvOperation.STEP, self._members[group])

    def step_wait(self, group: int) -> None:
        """Wait until one group has stepped."""
        self._processes.wait(group)

    def parts(self) -> Sequence[EnvBatch]:
        """Return a batch per group."""
        if len(self._groups) == 1:
            return (self,)
        return [
            GroupBatch(self, g, rows)
            for g, rows in enumerate(self._processes.spread.groups)
        ]

    def render(self, index: int) -> "NDArray[np.uint8] | None":
        """Return an image of one environment."""
        (image,) = self.ask(Ask("render", call=True), [index])
        return image

    def attribute(self, name: str) -> list[Any]:
        """Return an attribute of every environment."""
        return self.ask(Ask(name), range(self._size))

    def ask(self, question: Ask, indices: Sequence[int]) -> list[Any]:
        """Return the answer of each of ``indices``.

        An error in an environment's own method does not close the batch.

        Raises:
            AttributeError: the environments do not have the attribute.
            Exception: what a method raised, from a ``WorkerError``.
        """
        processes, control = self._processes, self._signals.shape.control
        self._settle([*self._groups, control])
        asked: dict[int, list[int]] = {}
        for k in indices:
            asked.setdefault(self._owners[k][1], []).append(k)
        for process, mine in asked.items():
            processes.send(process, AskSome(tuple(mine), question))
        self._signals.command(control, EnvOperation.MESSAGE, asked)
        values: dict[int, Any] = {}
        failed: tuple[int, EnvAnswer] | None = None
        for process, mine in asked.items():
            answer = processes.receive(process, EnvAnswer)
            if answer.failure is not None:
                failed = failed or (process, answer)
            else:
                values |= zip(mine, pickle.loads(answer.values), strict=True)
        if failed is not None and failed[1].failure is not None:
            raise_failure(failed[1].failure, failed[0])
        return [values[k] for k in indices]

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._processes.close()

    def _command_some(self, operation: EnvOperation, indices: Sequence[int]) -> None:
        """Run ``operation`` on some environments, in all their processes at once."""
        touched = {self._owners[k] for k in indices}
        groups = {group for group, _ in touched}
        self._settle(groups)
        chosen = self._signals.chosen
        for k in indices:
            chosen[k] = 1
        for group in groups:
            processes = [p for g, p in touched if g == group]
            self._signals.command(group, operation, processes)
        for group in groups:
            self._processes.wait(group)
        for k in indices:
            chosen[k] = 0

    def _settle(self, groups: Sequence[int] | set[int] | range) -> None:
        """Wait for commands of an interrupted call; raise if closed."""
        self._processes.check_open()
        for group in groups:
            self._processes.wait(group)


@final
class GroupBatch(EnvBatch):
    """The environments of one group, on their rows of the shared memory."""

    def __init__(self, whole: ParallelBatch, group: int, rows: range) -> None:
        """Select the environments ``rows`` of ``whole``."""
        self._whole = whole
        self._group = group
        self._rows = rows

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of each environment."""
        return self._whole.description

    @property
    def size(self) -> int:
        """Number of environments."""
        return len(self._rows)

    def allocate(self) -> "dict[Key, NDArray[np.generic]]":
        """Return the group's rows of the shared memory."""
        rows = slice(self._rows.start, self._rows.stop)
        return {key: array[rows] for key, array in self._whole.allocate().items()}

    def bind(self, memory: Row) -> None:
        """Do nothing: the processes are bound to what ``allocate`` returns."""

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode, with its own seed, in each of ``indices``."""
        self._whole.reset([self._rows[k] for k in indices], seeds)

    def step(self, indices: Sequence[int] | None = None) -> None:
        """Step all environments, or those of ``indices``."""
        if indices is None:
            self.start_step()
            self.finish_step()
        else:
            self._whole.step([self._rows[k] for k in indices])

    def start_step(self) -> None:
        """Start a step of the group's environments."""
        self._whole.step_async(self._group)

    def finish_step(self) -> None:
        """Wait until they have stepped."""
        self._whole.step_wait(self._group)

    def render(self, index: int) -> "NDArray[np.uint8] | None":
        """Return an image of one environment."""
        return self._whole.render(self._rows[index])

    def attribute(self, name: str) -> list[Any]:
        """Return an attribute of every environment of the group."""
        return self._whole.ask(Ask(name), self._rows)

    def close(self) -> None:
        """Close the whole batch."""
        self._whole.close()
