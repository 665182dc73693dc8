"""The base class of SerialEnv and ParallelEnv: N environments that act as one."""

from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NoReturn

from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import EnvDescription
from marl_collect.core.env import TensorDictEnv
from marl_collect.core.factories import Factory, Kwargs, spread
from marl_collect.options import Option, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Factories = Factory | Sequence[Factory]
_STEPPING = frozenset(
    {
        "bind",
        "close",
        "rand_step",
        "reset",
        "reset_row",
        "rollout",
        "set_seed",
        "step",
        "step_and_maybe_reset",
        "step_row",
    }
)
"""Methods that would change an environment's state without the batch noticing."""
STEPPING_SOME = (
    'To step or reset some environments, set "_step" or "_reset", bool [N], in the '
    "TensorDict that is passed to step() or reset() of the batch."
)


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


class JointEnvs(TensorDictEnv):
    """N environments. Final subclasses define how they are stepped.

    ``get_attr`` and ``call`` reach attributes and methods of the environments.
    ``env.attr`` is ``env.get_attr("attr")`` if this class has no such attribute.
    """

    _engine: EnvBatch

    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and guarantees of each environment."""
        return self._engine.description

    @property
    def batch_size(self) -> tuple[int, ...]:
        """``(N,)``."""
        return (self._engine.size,)

    def render(self) -> "list[NDArray[np.uint8] | None]":
        """Return an image ``[height, width, 3]`` or None of each environment."""
        return self.call("render")

    def __len__(self) -> int:
        """Return the number of environments."""
        return self._engine.size

    @property
    def num_workers(self) -> int:
        """N, as in TorchRL."""
        return len(self)

    def get_attr(self, name: str) -> list[Any]:
        """Return an attribute of every environment.

        Raises:
            AttributeError: the environments do not have it, or it is a method.
        """
        check_name(type(self).__name__, name)
        return self.engine().call_on(None, value_of, name)

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every environment; return the results.

        Raises:
            AttributeError: the environments do not have it, or it would step or reset
                an environment without the batch.
            Exception: what the method raised. The batch stays usable.
        """
        check_name(type(self).__name__, name)
        return self.engine().call_on(None, methodcaller(name, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """Return ``get_attr(name)``."""
        return self.get_attr(name)

    def __getitem__(self, index: object) -> NoReturn:
        """Raise an error: environments are not selected by index."""
        raise TypeError(
            f"The environments of a {type(self).__name__} cannot be indexed: "
            "get_attr(name) and call(name, ...) return lists with one entry per "
            f"environment. {STEPPING_SOME}"
        )


def check_name(batch: str, name: str, instead: str = STEPPING_SOME) -> None:
    """Check that environments may be asked for an attribute.

    Args:
        batch: class of the batch, for error messages.
        name: of the attribute.
        instead: what to do instead of stepping some environments.

    Raises:
        AttributeError: the name is private, or that of a method that steps.
    """
    if name.startswith("_"):
        # Includes what copy, pickle and notebooks look up on the batch itself.
        raise AttributeError(f"{batch} has no attribute {name!r}")
    if name in _STEPPING:
        raise AttributeError(
            f"{name!r} cannot be used on single environments of a {batch}. {instead}"
        )


def value_of(env: Any, name: str) -> Any:
    """Return an attribute of an environment.

    Raises:
        AttributeError: there is none, or it is a method.
    """
    attribute = getattr(env, name)
    if callable(attribute):
        raise AttributeError(  # noqa: TRY004 - `hasattr` is False
            f"{name!r} is a method, not a value: env.call({name!r}, ...) calls it in "
            "every environment, and returns the list of results."
        )
    return attribute
