"""``EnvBatch``: the interface through which the engine steps environments.

``SerialBatch`` implements it for environments of this process, ``ParallelEnv`` for
environments in other processes, and ``WorldBatch`` for a simulator of many worlds.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import methodcaller
from typing import TYPE_CHECKING, Any, final

from marl_collect.core.description import EnvDescription, Key, Row, allocate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Function = Callable[..., Any]
Indices = Sequence[int] | None
"""Of environments; None for all."""


def consecutive(sizes: Iterable[int], start: int = 0) -> list[range]:
    """Return the rows of parts of these sizes, one after the other."""
    return [range(*bounds) for bounds in pairwise(accumulate(sizes, initial=start))]


class EnvBatch(abc.ABC):
    """Several environments with the same description, stepped together.

    The caller binds memory once, with ``memory = batch.allocate()`` and
    ``batch.bind(memory)``. After that all data are exchanged through this memory:
    ``reset`` writes observations and flags, and a step reads actions and writes
    observations, flags and rewards. No method returns data of a frame.

    A step is ``step_async()``, then ``step_wait()``. In between, the caller may do
    other work, but must not access the memory. A batch that steps in the caller's
    thread does all the work in ``step_async``. ``parts()`` divides the batch, so that
    the policy can act for one part while the environments of another one step.

    Attributes:
        description: groups and spaces of each environment.
        size: number of environments.
        is_async: whether environments may still step when ``step_async`` returns. If
            not, ``step_wait`` does nothing, and the step loop omits the call.
        one_simulator: whether all environments are worlds of one simulator, which
            begins several of them in one call, and cannot step only some of them.
        first: index of its first environment, as the user counts them.
        raised: index within the batch of the environment whose reset or step raised
            an error; None if it is unknown.
        checks_actions: whether a simulator refuses actions that it lacks. The step loop
            clears it for random actions, which it draws from the spaces.
    """

    description: EnvDescription
    size: int
    is_async = False
    one_simulator = False
    first = 0
    raised: int | None = None
    checks_actions = True

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

    @property
    @abc.abstractmethod
    def step_async(self) -> Callable[[], None]:
        """Begin a step of all environments. ``step_wait`` must follow.

        This is a property, so that a batch of one environment can return the method of
        that environment: a call in between would take 0.2 us per frame.
        """

    def step_wait(self) -> None:  # noqa: B027 - most batches are not asynchronous
        """Wait for the step that ``step_async`` began."""

    def step_some(self, indices: Sequence[int]) -> None:
        """Step the environments of ``indices``, and wait for them.

        Raises:
            ValueError: if they are worlds of one simulator, and not all of them.
        """
        if len(indices) != self.size:
            raise ValueError(
                f"{self.description.name} steps all of its {self.size} worlds in one "
                f"call, so it cannot step only {len(indices)} of them: leave '_step' "
                "out."
            )
        self.step()

    @final
    def step(self) -> None:
        """Step all environments, and wait for them."""
        self.step_async()
        self.step_wait()

    def parts(self) -> "Sequence[EnvBatch]":
        """Return the parts of this batch that can be stepped independently, in order.

        The policy acts for one part while the others step.
        """
        return (self,)

    @abc.abstractmethod
    def call_on(self, indices: Indices, function: Function, *args: Any) -> list[Any]:
        """Return ``function(env, *args)`` of some environments.

        Args:
            indices: of the environments; None for all. A simulator of many worlds is
                called once, whatever they are.
            function: gets each environment.
            args: further arguments of the function.
        """

    def attribute(self, name: str) -> list[Any]:
        """Return an attribute of every environment, or of the simulator of all."""
        return self.call_on(None, getattr, name)

    @final
    def call(
        self, index: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of one environment, or of the simulator of all worlds."""
        (value,) = self.call_on((index,), methodcaller(name, *args, **kwargs))
        return value

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


class SimulatorBatch(EnvBatch):
    """The worlds of one simulator, in an ``EnvWrapper`` that steps them.

    ``WorldBatch`` steps those of a simulator without a wrapper.
    """

    one_simulator = True

    def __init__(self, env: Any) -> None:
        """Take ownership of ``env``, whose ``batch_size`` is ``(size,)``."""
        self.env = env
        self.description = env.description
        self.size = env.batch_size[0]

    def bind(self, memory: Row) -> None:
        """Exchange all data through ``memory``, ``[K, ...]`` per key."""
        self.env.bind(memory)

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each of ``indices``, in one call of the simulator."""
        self.env.reset_worlds(indices, seeds)

    @property
    def step_async(self) -> Callable[[], None]:
        """Step all worlds."""
        return self.env.step_row

    def call_on(self, indices: Indices, function: Function, *args: Any) -> list[Any]:
        """Return ``function(simulator, *args)``, as a list of one."""
        del indices
        return [function(self.env, *args)]

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()


@final
class SerialBatch(EnvBatch):
    """A batch of environments that are stepped one after another in this process."""

    def __init__(self, envs: Sequence[Any], first: int = 0) -> None:
        """Take ownership of environments.

        Args:
            envs: each a ``MultiAgentEnv`` or a wrapper of one; with equal groups and
                spaces.
            first: index of the first one, as the user counts them.
        """
        self._envs = list(envs)
        self.description = envs[0].description
        self.size = len(envs)
        self.first = first

    def bind(self, memory: Row) -> None:
        """Bind environment ``k`` to the rows ``memory[key][k]``."""
        for k, env in enumerate(self._envs):
            env.bind({key: array[k, ...] for key, array in memory.items()})

    def reset(self, indices: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each of ``indices``, with its own seed."""
        k = -1
        try:
            for k, seed in zip(indices, seeds, strict=True):
                self._envs[k].reset_row(seed)
        except Exception as error:
            self._note(error, k)
            raise

    @property
    def step_async(self) -> Callable[[], None]:
        """Step all environments."""
        return self._envs[0].step_row if len(self._envs) == 1 else self._step_all

    def step_some(self, indices: Sequence[int]) -> None:
        """Step the environments of ``indices``."""
        self._step([self._envs[k] for k in indices])

    def _step_all(self) -> None:
        self._step(self._envs)

    def _step(self, envs: Sequence[Any]) -> None:
        try:
            for env in envs:
                env.step_row()
        except Exception as error:
            self._note(error, self._envs.index(env))
            raise

    def _note(self, error: Exception, k: int) -> None:
        """Note which environment raised an error."""
        self.raised = k
        if self.size > 1:
            error.add_note(
                f"The error was raised by environment {self.first + k}, which is one "
                f"of {self.size} in its process."
            )

    def call_on(self, indices: Indices, function: Function, *args: Any) -> list[Any]:
        """Return ``function(env, *args)`` of some environments, or all."""
        envs = self._envs if indices is None else [self._envs[k] for k in indices]
        return [function(env, *args) for env in envs]

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
