"""Every workload: groups, sizes, and the libraries' own environments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Group:
    """Agents that see and do the same kind of thing.

    Attributes:
        agents: how many.
        inputs: numbers in an observation; 0 if it is a picture.
        actions: numbers in an action, or choices if ``discrete``.
        discrete: whether an agent chooses one of these.
    """

    agents: int
    inputs: int
    actions: int
    discrete: bool


@final
@dataclass(frozen=True)
class Workload:
    """An environment to step.

    Attributes:
        name: as in the results.
        title: as in tables.
        family: ``"pettingzoo"`` or ``"meltingpot"``: whose interface it has.
        groups: by the name that TorchRL and we give them.
        stock: builds the library's own environment.
        task: the library's name of it, for those that have one.
    """

    name: str
    title: str
    family: str
    groups: Mapping[str, Group]
    stock: Callable[..., Any]
    task: str = ""

    @property
    def agents(self) -> int:
        """How many agents act; all of them are alive until the episode ends."""
        return sum(group.agents for group in self.groups.values())


def _multiwalker() -> Any:
    from pettingzoo.sisl import multiwalker_v9

    return multiwalker_v9.parallel_env()


def _simple_spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


def _commons_harvest() -> Any:
    from meltingpot import substrate

    name = "commons_harvest__open"
    config = substrate.get_config(name)
    return substrate.build(name, roles=config.default_player_roles)


def _free() -> Any:
    from workloads.free import FreeEnv

    return FreeEnv()


def _burning(**keywords: Any) -> Any:
    from workloads.burning import BurningEnv

    return BurningEnv(**keywords)


_ALL = [
    Workload(
        "free",
        "free, 3 agents x 31 floats",
        "pettingzoo",
        {"agent": Group(3, 31, 4, discrete=False)},
        _free,
    ),
    Workload(
        "multiwalker",
        "multiwalker_v9",
        "pettingzoo",
        {"walker": Group(3, 31, 4, discrete=False)},
        _multiwalker,
        "multiwalker_v9",
    ),
    Workload(
        "simple_spread",
        "simple_spread_v3",
        "pettingzoo",
        {"agent": Group(3, 18, 5, discrete=True)},
        _simple_spread,
        "simple_spread_v3",
    ),
    Workload(
        "commons_harvest",
        "commons_harvest__open, RGB only",
        "meltingpot",
        {"agents": Group(7, 0, 8, discrete=True)},
        _commons_harvest,
        "commons_harvest__open",
    ),
    Workload(
        "burning",
        "burning",
        "pettingzoo",
        {"agent": Group(3, 31, 5, discrete=True)},
        _burning,
    ),
]

WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
