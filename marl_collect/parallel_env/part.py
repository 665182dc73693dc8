"""One group of a batch in other processes, as a batch of its own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from marl_collect.description import EnvDescription, Key, Row
from marl_collect.env import EnvBatch
from marl_collect.parallel_env.messages import Ask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from marl_collect.parallel_env.batch import ParallelBatch


@final
class Part(EnvBatch):
    """The environments of one group, on their rows of the shared memory."""

    def __init__(self, whole: "ParallelBatch", group: int, rows: range) -> None:
        """Be the environments ``rows`` of ``whole``."""
        self._whole = whole
        self._group = group
        self._rows = rows

    @property
    def description(self) -> EnvDescription:
        """What each of the environments looks like."""
        return self._whole.description

    @property
    def size(self) -> int:
        """How many environments there are."""
        return len(self._rows)

    def allocate(self) -> "dict[Key, NDArray[np.generic]]":
        """Return the group's rows of the shared memory."""
        rows = slice(self._rows.start, self._rows.stop)
        return {key: array[rows] for key, array in self._whole.allocate().items()}

    def bind(self, memory: Row) -> None:
        """Do nothing: the processes are bound to what `allocate` returns."""

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
        """Have the group's environments step."""
        self._whole.step_async(self._group)

    def finish_step(self) -> None:
        """Wait until they have."""
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
