"""The engine's face of environments: several of one description, stepped together."""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from marl_collect.description import EnvDescription, Key, Row, allocate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class EnvBatch(abc.ABC):
    """Several environments of one description that are stepped together."""

    @property
    @abc.abstractmethod
    def description(self) -> EnvDescription:
        """What each of the environments looks like."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many environments there are."""

    def allocate(self) -> "dict[Key, NDArray[np.generic]]":
        """Return memory for ``bind``, an array ``[size, ...]`` per key of the row.

        A batch whose environments live elsewhere returns what it shares with them,
        and can be bound to nothing else.
        """
        return allocate(self.description.row(), (self.size,))

    @abc.abstractmethod
    def bind(self, memory: Row) -> None:
        """Read actions from and write all else to ``memory``, ``[size, ...]``."""

    @abc.abstractmethod
    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode, with its own seed, in each of ``indices``."""

    @abc.abstractmethod
    def step(self, indices: Sequence[int] | None = None) -> None:
        """Step all environments, or those of ``indices``."""

    def start_step(self) -> None:
        """Begin a step of all environments, which ``finish_step`` waits for.

        The memory is the environments' until then.
        """
        self.step()

    def finish_step(self) -> None:  # noqa: B027 - step() above leaves nothing to do
        """Wait until the step is done that ``start_step`` began."""

    def parts(self) -> "Sequence[EnvBatch]":
        """Return batches, together all of this one in order, to step by turns.

        While the policy acts for one of them, the others step.
        """
        return (self,)

    @abc.abstractmethod
    def render(self, index: int) -> "NDArray[np.uint8] | None":
        """Return an image ``[height, width, 3]`` of one environment, if it has any."""

    @abc.abstractmethod
    def attribute(self, name: str) -> "list[Any]":
        """Return an attribute of every environment."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back; may be called twice."""
