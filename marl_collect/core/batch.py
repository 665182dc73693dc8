"""The engine's face of environments: several of one description, stepped together."""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from marl_collect.core.description import EnvDescription, Key, Row, allocate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RowEnv(Protocol):
    """What `SerialBatch` needs of an environment; `MultiAgentEnv` has it."""

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces."""

    def bind(self, row: Row) -> None:
        """Read actions from and write all else to ``row``."""

    def reset_row(self, seed: int) -> None:
        """Begin an episode."""

    def step_row(self) -> None:
        """Step with the row's actions."""

    def render(self) -> "NDArray[np.uint8] | None":
        """Return an image, if there is one."""

    def close(self) -> None:
        """Release everything."""


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

    def stepper(self) -> Callable[[], None] | None:
        """Return what steps all environments in this process, in one call.

        None where others step them, so that something else can be done meanwhile.
        """
        return None

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


@final
class SerialBatch(EnvBatch):
    """Environments stepped one after the other in this process."""

    def __init__(self, envs: Sequence[RowEnv]) -> None:
        """Own ``envs``, whose descriptions must be equal in groups and spaces."""
        self._envs = list(envs)

    @property
    def description(self) -> EnvDescription:
        """What each of the environments looks like."""
        return self._envs[0].description

    @property
    def size(self) -> int:
        """How many environments there are."""
        return len(self._envs)

    def bind(self, memory: Row) -> None:
        """Give environment ``k`` the rows ``memory[key][k]``."""
        for k, env in enumerate(self._envs):
            env.bind({key: array[k, ...] for key, array in memory.items()})

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode, with its own seed, in each of ``indices``."""
        for k, seed in zip(indices, seeds, strict=True):
            self._envs[k].reset_row(seed)

    def stepper(self) -> Callable[[], None]:
        """Return what steps all environments."""
        return self._envs[0].step_row if len(self._envs) == 1 else self.step

    def step(self, indices: Sequence[int] | None = None) -> None:
        """Step all environments, or those of ``indices``."""
        chosen = self._envs if indices is None else [self._envs[k] for k in indices]
        try:
            for env in chosen:
                env.step_row()
        except Exception as error:
            if self.size > 1:
                k = self._envs.index(env)
                error.add_note(f"This was environment {k} of the {self.size} here.")
            raise

    def render(self, index: int) -> "NDArray[np.uint8] | None":
        """Return an image of one environment."""
        return self._envs[index].render()

    def attribute(self, name: str) -> "list[Any]":
        """Return an attribute of every environment."""
        return [getattr(env, name) for env in self._envs]

    def close(self) -> None:
        """Close every environment, also when one of them fails to."""
        errors: list[Exception] = []
        for env in self._envs:
            try:
                env.close()
            except Exception as error:  # noqa: BLE001 - raised below, after the rest
                errors.append(error)
        if errors:
            raise errors[0]
