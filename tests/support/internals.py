"""How tests reach what collectors and environments keep to themselves."""

from typing import Any

from marl_collect.core.description import allocate


def source_of(collector: Any) -> Any:
    """Return what fills a collector's batches."""
    return collector._source


def workers_of(collector: Any) -> Any:
    """Return the trainer's side of a collector's workers."""
    return source_of(collector)._workers


def pool_of(collector: Any) -> Any:
    """Return the pool of a collector's workers."""
    return workers_of(collector)._pool


def lab2d_world(env: Any) -> Any:
    """Return the Lab2d of an environment of Lab2d or MeltingPot."""
    return getattr(env._world, "_lab2d", env._world)


class Around:
    """Passes everything on to a Lab2d."""

    def __init__(self, env: Any) -> None:
        """Take the place of the Lab2d in the world of ``env``."""
        world = lab2d_world(env)
        self._lab = world.lab
        world._lab = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lab, name)


def names_read(env: Any) -> list[str]:
    """Return a list of what an environment reads from its Lab2d from now on."""
    names: list[str] = []

    class Noting(Around):
        def observation(self, name: str) -> Any:
            names.append(name)
            return self._lab.observation(name)

    Noting(env)
    return names


def bound(env: Any, seed: int = 0) -> Any:
    """Return a row that ``env`` is bound to, after a reset."""
    row = allocate(env.description.row())
    env.bind(row)
    env.reset_row(seed)
    return row
