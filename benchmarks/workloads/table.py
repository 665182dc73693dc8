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
        task: the library's name of it, for those that have one.
        make: the library's own environment, for families without a task.
    """

    name: str
    title: str
    family: str
    groups: Mapping[str, Group]
    task: str = ""
    make: Callable[..., Any] | None = None

    @property
    def agents(self) -> int:
        """How many agents act; all of them are alive until the episode ends."""
        return sum(group.agents for group in self.groups.values())

    def stock(self, **keywords: Any) -> Any:
        """Build the library's own environment."""
        if self.make is not None:
            return self.make(**keywords)
        return _STOCK[self.task]()


def _multiwalker() -> Any:
    from pettingzoo.sisl import multiwalker_v9

    return multiwalker_v9.parallel_env()


def _simple_spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


def _simple_tag() -> Any:
    from mpe2 import simple_tag_v3

    return simple_tag_v3.parallel_env()


def _substrate(name: str) -> Callable[[], Any]:
    def make() -> Any:
        from meltingpot import substrate

        config = substrate.get_config(name)
        return substrate.build(name, roles=config.default_player_roles)

    return make


_STOCK: Mapping[str, Callable[[], Any]] = {
    "multiwalker_v9": _multiwalker,
    "simple_spread_v3": _simple_spread,
    "simple_tag_v3": _simple_tag,
    "commons_harvest__open": _substrate("commons_harvest__open"),
    "coins": _substrate("coins"),
}


def _free(agents: int, size: int) -> Callable[..., Any]:
    def make() -> Any:
        from workloads.free import FreeEnv

        return FreeEnv(agents, size)

    return make


def _burning(**keywords: Any) -> Any:
    from workloads.burning import BurningEnv

    return BurningEnv(**keywords)


def _walkers(agents: int, inputs: int) -> Group:
    return Group(agents, inputs, 4, discrete=False)


def _choosers(agents: int, inputs: int, actions: int = 5) -> Group:
    return Group(agents, inputs, actions, discrete=True)


_ALL = [
    Workload(
        "free",
        "free, 3 agents x 31 floats",
        "pettingzoo",
        {"agent": _walkers(3, 31)},
        make=_free(3, 31),
    ),
    Workload(
        "free_8x256",
        "free, 8 agents x 1 KB",
        "pettingzoo",
        {"agent": _walkers(8, 256)},
        make=_free(8, 256),
    ),
    Workload(
        "free_7x5808",
        "free, 7 agents x 23 KB",
        "pettingzoo",
        {"agent": _walkers(7, 5808)},
        make=_free(7, 5808),
    ),
    Workload(
        "multiwalker",
        "multiwalker_v9",
        "pettingzoo",
        {"walker": _walkers(3, 31)},
        task="multiwalker_v9",
    ),
    Workload(
        "simple_spread",
        "simple_spread_v3",
        "pettingzoo",
        {"agent": _choosers(3, 18)},
        task="simple_spread_v3",
    ),
    Workload(
        "simple_tag",
        "simple_tag_v3",
        "pettingzoo",
        {"adversary": _choosers(3, 16), "agent": _choosers(1, 14)},
        task="simple_tag_v3",
    ),
    Workload(
        "commons_harvest",
        "commons_harvest__open, RGB only",
        "meltingpot",
        {"agents": _choosers(7, 0, 8)},
        task="commons_harvest__open",
    ),
    Workload(
        "coins",
        "coins, RGB only",
        "meltingpot",
        {"agents": _choosers(2, 0, 7)},
        task="coins",
    ),
    Workload(
        "burning",
        "burning",
        "pettingzoo",
        {"agent": _choosers(3, 31)},
        make=_burning,
    ),
]

WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
