"""Steps and resets of each environment, with its library's loop and with ours.

Both loops take the same actions. Steps are those between resets.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from harness.turns import Alternative
from limits.loops import N_ACTIONS, Loop, MeltingpotLoop, OurLoop, PettingZooLoop

from cases.case import Case
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.seeding import episode_seed

STEPS = 64
"""Between two looks at the clock, if no episode ends."""


@dataclass(frozen=True)
class Row:
    """One environment of the table.

    Attributes:
        name: as printed.
        ours: builds our environment.
        stock: builds the library's own loop from ``N_ACTIONS`` joint actions, each a
            dict of arrays by group, and from the agents of each group.
    """

    name: str
    ours: Callable[[], MultiAgentEnv]
    stock: Callable[[list[dict[str, Any]], dict[str, list[str]]], Loop]


def pettingzoo(task: str, **keywords: Any) -> Row:
    """Return the row of a task of PettingZoo."""

    def ours() -> MultiAgentEnv:
        from marl_collect.envs import PettingZooEnv

        return PettingZooEnv(task, **keywords)

    def stock(actions: list[dict[str, Any]], group_map: dict[str, list[str]]) -> Loop:
        from marl_collect.envs.pettingzoo.tasks import find_task

        env = find_task(task)(**keywords)
        return PettingZooLoop(env, actions, group_map, done_on_any=True)

    options = ", ".join(f"{key}={value}" for key, value in keywords.items())
    return Row(f"{task}({options})" if options else task, ours, stock)


def meltingpot(substrate: str, **keywords: Any) -> Row:
    """Return the row of a substrate; MeltingPot's loop computes all observations."""

    def ours() -> MultiAgentEnv:
        from marl_collect.envs import MeltingpotEnv

        return MeltingpotEnv(substrate, **keywords)

    def stock(actions: list[dict[str, Any]], group_map: dict[str, list[str]]) -> Loop:
        del group_map  # There is one group, in the order of the players.
        import meltingpot

        config = meltingpot.substrate.get_config(substrate)
        env = meltingpot.substrate.build(substrate, roles=config.default_player_roles)
        return MeltingpotLoop(env, actions)

    sprites = ", ".join(keywords.get("observations") or ["all"])
    picture = " + world" if keywords.get("world_rgb") else ""
    return Row(f"{substrate} ({sprites}{picture})", ours, stock)


ROWS = [
    pettingzoo("simple_spread_v3"),
    pettingzoo("simple_tag_v3"),
    pettingzoo("simple_world_comm_v3"),
    pettingzoo("simple_spread_v3", continuous_actions=True, N=6),
    pettingzoo("multiwalker_v9"),
    pettingzoo("pursuit_v5"),
    pettingzoo("knights_archers_zombies_v11"),
    pettingzoo("pistonball_v6", n_pistons=10),
    pettingzoo("cooperative_pong_v6"),
    meltingpot("commons_harvest__open", observations=["RGB"]),
    meltingpot("commons_harvest__open", world_rgb=True),
    meltingpot("clean_up", observations=["RGB"]),
    meltingpot("predator_prey__open", observations=["RGB"]),
    meltingpot("coins", observations=["RGB"]),
    meltingpot("collaborative_cooking__cramped", observations=["RGB"]),
    meltingpot("prisoners_dilemma_in_the_matrix__repeated", observations=["RGB"]),
]
"""The rows of the table. Rows whose library is not installed are left out."""


def step(loop: Loop) -> Alternative:
    """Return the call that steps until the episode ends, or many times."""
    episodes, numbers = itertools.count(), itertools.cycle(range(N_ACTIONS))

    def reset() -> None:
        if loop.over:
            loop.reset(episode_seed(0, 0, next(episodes)))

    def call() -> float:
        count = 0
        while count < STEPS and not loop.over:
            loop.step(next(numbers))
            count += 1
        return count

    return Alternative(call, reset)


def reset(loop: Loop) -> Alternative:
    """Return the call that begins an episode."""
    episodes = itertools.count()
    return Alternative.once(lambda: loop.reset(episode_seed(0, 0, next(episodes))))


def build(
    stack: ExitStack, row: Row, measure: Callable[[Loop], Alternative]
) -> dict[str, Alternative]:
    """Return our loop and the library's, with the same actions."""
    from marl_collect.core.random_actions import samplers

    env = row.ours()
    random = np.random.default_rng(0)
    group_samplers = list(samplers(env.description))
    actions = [
        {s.key[0]: s.actions(random.random(s.noise_shape)) for s in group_samplers}
        for _ in range(N_ACTIONS)
    ]
    ours = OurLoop(env, actions)
    stack.callback(ours.close)
    stock = row.stock(actions, env.group_map)
    stack.callback(stock.close)
    return {"ours": measure(ours), "stock": measure(stock)}


def cases() -> list[Case]:
    """Return two rows per environment: its steps between resets, and its resets."""
    return [
        Case(
            f"{row.name}, {measure.__name__}",
            partial(build, row=row, measure=measure),
            work,
        )
        for row in ROWS
        for measure, work in ((step, "step"), (reset, "reset"))
    ]
