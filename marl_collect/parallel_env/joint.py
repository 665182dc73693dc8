"""The base class of SerialEnv and ParallelEnv: N environments that act as one."""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from marl_collect.core.description import EnvDescription
from marl_collect.core.env import EnvBatch, TensorDictEnv
from marl_collect.parallel_env.attributes import Asker, View, dispatch
from marl_collect.parallel_env.messages import Ask

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
