"""``EnvBatch``: the interface through which the engine steps environments.

``SerialBatch`` implements it for environments of this process, ``ParallelEnv`` for
environments in other processes.
"""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from marl_collect.core.description import EnvDescription, Key, Row, allocate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RowEnv(Protocol):
    """The methods that ``SerialBatch`` calls. ``MultiAgentEnv`` implements them."""

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces."""

    def bind(self, row: Row) -> None:
        """Read actions from ``row`` and write everything else to it."""

    def reset_row(self, seed: int) -> None:
        """Begin an episode."""

    def step_row(self) -> None:
        """Step with the row's actions."""

    def render(self) -> "NDArray[np.uint8] | None":
        """Return an image, or None."""

    def close(self) -> None:
        """Release everything."""


class EnvBatch(abc.ABC):
    """Several environments with the same description, stepped together.

    The caller binds memory once, with ``memory = batch.allocate()`` and
    ``batch.bind(memory)``. After that all data are exchanged through this memory:
    ``reset`` writes observations and flags, and a step reads actions and writes
    observations, flags and rewards. No method returns data of a frame.

    There is one kind of step, and three ways to wait for it:

    - ``step(indices)`` blocks until the step is done. Only ``step`` can step a subset.
    - ``start_step()`` followed by ``finish_step()`` splits ``step()`` in two, so that
      the caller can work between them. It must not touch the memory in between. A
      batch that steps in the caller's thread does all the work in ``start_step``.
    - ``stepper()`` returns a plain callable that is equivalent to ``step()`` and saves
      a few calls per frame, or None if splitting the step is worthwhile.

    The step loop calls the stepper if there is one, and otherwise ``start_step`` and
    ``finish_step``. ``parts()`` divides the batch, so that the policy can act for one
    part while the environments of another one step.
    """

    @property
    @abc.abstractmethod
    def description(self) -> EnvDescription:
        """Groups and spaces of each environment."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of environments."""

    def allocate(self) -> "dict[Key, NDArray[np.generic]]":
        """Return memory for ``bind``, an array ``[size, ...]`` per key of the row.

        A batch whose environments run in other processes returns the memory that it
        shares with them. It can be bound to no other memory.
        """
        return allocate(self.description.row(), (self.size,))

    @abc.abstractmethod
    def bind(self, memory: Row) -> None:
        """Read actions from ``memory``, ``[size, ...]``, and write all else to it."""

    @abc.abstractmethod
    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each of ``indices``, with its own seed."""

    @abc.abstractmethod
    def step(self, indices: Sequence[int] | None = None) -> None:
        """Step all environments, or those of ``indices``, and wait for them."""

    def start_step(self) -> None:
        """Begin a step of all environments. ``finish_step`` must follow.

        The caller must not access the memory until then.
        """
        self.step()

    def finish_step(self) -> None:  # noqa: B027 - step() above leaves nothing to do
        """Wait for the step that ``start_step`` began."""

    def stepper(self) -> Callable[[], None] | None:
        """Return a callable that does the same as ``step()``, with less overhead.

        None if other processes step the environments. The caller then uses
        ``start_step`` and ``finish_step``, and can work while they step.
        """
        return None

    def parts(self) -> "Sequence[EnvBatch]":
        """Return the parts of this batch that can be stepped independently, in order.

        The policy acts for one part while the others step.
        """
        return (self,)

    @abc.abstractmethod
    def render(self, index: int) -> "NDArray[np.uint8] | None":
        """Return an image ``[height, width, 3]`` of one environment, or None."""

    @abc.abstractmethod
    def attribute(self, name: str) -> "list[Any]":
        """Return an attribute of every environment."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


@final
class SerialBatch(EnvBatch):
    """A batch of environments that are stepped one after another in this process."""

    def __init__(self, envs: Sequence[RowEnv]) -> None:
        """Take ownership of ``envs``, which must have equal groups and spaces."""
        self._envs = list(envs)

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of each environment."""
        return self._envs[0].description

    @property
    def size(self) -> int:
        """Number of environments."""
        return len(self._envs)

    def bind(self, memory: Row) -> None:
        """Bind environment ``k`` to the rows ``memory[key][k]``."""
        for k, env in enumerate(self._envs):
            env.bind({key: array[k, ...] for key, array in memory.items()})

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each of ``indices``, with its own seed."""
        for k, seed in zip(indices, seeds, strict=True):
            self._envs[k].reset_row(seed)

    def stepper(self) -> Callable[[], None]:
        """Return ``step``, or ``step_row`` of the only environment."""
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
                error.add_note(
                    f"The error was raised by environment {k} of {self.size} in this "
                    "process."
                )
            raise

    def render(self, index: int) -> "NDArray[np.uint8] | None":
        """Return an image of one environment."""
        return self._envs[index].render()

    def attribute(self, name: str) -> "list[Any]":
        """Return an attribute of every environment."""
        return [getattr(env, name) for env in self._envs]

    def close(self) -> None:
        """Close every environment, even if one of them raises."""
        errors: list[Exception] = []
        for env in self._envs:
            try:
                env.close()
            except Exception as error:  # noqa: BLE001 - raised below, after the rest
                errors.append(error)
        if errors:
            raise errors[0]
