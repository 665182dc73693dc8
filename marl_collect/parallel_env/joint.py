"""The base class of SerialEnv and ParallelEnv: N environments that act as one."""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import EnvDescription
from marl_collect.core.env import TensorDictEnv
from marl_collect.core.factories import Factory, Kwargs, spread
from marl_collect.options import Option, require
from marl_collect.parallel_env.attributes import Asker, View, dispatch
from marl_collect.parallel_env.messages import Ask

Factories = Factory | Sequence[Factory]


def factories_of(
    num_workers: int, create_env_fn: Factories, create_env_kwargs: Kwargs
) -> list[Factory]:
    """Return the factory of each of ``num_workers`` environments.

    Raises:
        TypeError: an environment was passed. The message shows the factory to write.
        ValueError: the length of a list is not ``num_workers``.
    """
    num_workers = require("num_workers", num_workers, int, Option("", at_least=1))
    if isinstance(create_env_fn, Sequence) and len(create_env_fn) != num_workers:
        raise ValueError(
            f"create_env_fn has {len(create_env_fn)} factories, but num_workers, the "
            f"number of environments, is {num_workers}: pass one factory for each, or "
            "one for all."
        )
    dealt = spread(create_env_fn, num_workers, 1, create_env_kwargs)
    return [factory for factories in dealt for factory in factories]


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class JointEnvs(TensorDictEnv):
    """N environments. Final subclasses define how they are stepped.

    Attributes and methods that this class does not define are read from its
    environments, as lists: ``env.attr``, ``env.method(...)``. ``env[i]`` and
    ``env[i:j]`` select some of them.
    """

    _engine: EnvBatch

    @final
    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and guarantees of each environment."""
        return self._engine.description

    @final
    @property
    def batch_size(self) -> tuple[int, ...]:
        """``(N,)``."""
        return (self._engine.size,)

    @final
    def render(self) -> "list[NDArray[np.uint8] | None]":
        """Return an image ``[height, width, 3]`` or None of each environment."""
        return self._ask(Ask("render", call=True), range(len(self)))

    @final
    def __len__(self) -> int:
        """Return the number of environments."""
        return self._engine.size

    @final
    @property
    def num_workers(self) -> int:
        """N, as in TorchRL."""
        return len(self)

    @final
    def __getitem__(self, index: Any) -> View:
        """Return a view of one environment, or of some, for their attributes.

        ``env[1].attr`` is the attribute of environment 1, ``env[1:3].attr`` a list of
        two; methods are called in the environments. To step or reset some of them, set
        ``"_step"`` or ``"_reset"``, bool ``[N]``, in the TensorDict that is passed to
        ``step`` or ``reset``.

        Args:
            index: an integer, a slice, or a list or tensor of integers.

        Raises:
            IndexError: there is no environment of that index.
            TypeError: the index is a mask of booleans, or no index at all.
        """
        return View(type(self).__name__, len(self), index, self._ask)

    @final
    def __getattr__(self, name: str) -> Any:
        """Return the attribute of every environment, or call it in each."""
        asker: Asker = lambda question: self._ask(question, range(len(self)))  # noqa: E731
        return dispatch(type(self).__name__, name, asker)

    @abc.abstractmethod
    def _ask(self, question: Ask, indices: Sequence[int]) -> list[Any]:
        """Return the answer of each of ``indices``."""
