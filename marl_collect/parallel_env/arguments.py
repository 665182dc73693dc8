"""Converts arguments of SerialEnv and ParallelEnv to one factory per environment."""

from collections.abc import Sequence

from marl_collect.core.factories import Factory, Kwargs, spread
from marl_collect.options import Option, require

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
