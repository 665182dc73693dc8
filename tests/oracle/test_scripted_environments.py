"""Agents end, join, wait, vanish and come back: a model has every entry."""

from random import Random
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from stock_replay import Trial, collect, compare
from stock_zoo import Stock
from support.zoo import Script

from marl_collect import MarlGroupMapType
from marl_collect.testing.check_env import check_env

AGENTS = [f"agent_{i}" for i in range(4)]
FLAGGED = ["terminated", "truncated", "both"]
FRAMES = 24


def legal(i: int, step: int) -> Any:
    """Return an info with a mask of five actions, one of which is illegal."""
    mask = np.ones(5, np.int8)
    mask[(i + step) % 5] = 0
    return {"action_mask": mask, "speed": [step, i]}


SPACES: list[Any] = [
    spaces.Discrete(5),
    spaces.Discrete(5, start=7),
    spaces.MultiDiscrete([3, 4], start=[1, 2]),
    spaces.MultiBinary(2),
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Box(-np.inf, np.inf, (40,), np.float64),
]


LIVES = [
    *("stays", "ends", "joins", "joins and ends", "ends and returns", "waits"),
    "ends but stays listed",
]


def lives(random: Random, *, parallel: bool) -> dict[str, Any]:
    """Return when each of four agents ends, joins, waits and comes back."""
    kinds = ("ends", "joins", "returns", "waits")
    events: dict[str, Any] = {kind: {} for kind in kinds} | {"lingers": set()}
    reasons = [*FLAGGED, *["vanished"] * parallel]
    for agent in AGENTS:
        life = random.choice(LIVES)
        if "ends" in life:
            events["ends"][agent] = random.randint(1, 5), random.choice(reasons)
        if "listed" in life and parallel and events["ends"][agent][1] in FLAGGED:
            events["lingers"].add(agent)
        if "joins" in life and agent != AGENTS[0]:  # Somebody begins.
            events["joins"][agent] = random.randint(1, 7)
        if "returns" in life:
            # Late enough for turn-based agents to be removed first, in a round.
            events["returns"][agent] = random.randint(8, 10)
        if "waits" in life and agent != AGENTS[0] and parallel:
            events["waits"][agent] = random.sample(range(10), 4)
    return events


def drawn(seed: int, *, parallel: bool) -> Trial:
    """Return an episode of four agents, and the options of their environment."""
    random = Random(seed)

    def one_of(*values: Any) -> Any:
        return random.choice(values)

    action = one_of(*SPACES)
    discrete = isinstance(action, spaces.Discrete)
    script = Script(
        n_agents=4,
        **lives(random, parallel=parallel),
        max_cycles=one_of(14, 12, 3, 1),
        action=action,
        info=legal if discrete and one_of(True, False) else None,
    )
    maps = None, *MarlGroupMapType, {"b": AGENTS[:0:-1], "a": AGENTS[:1]}
    options = {
        "done_on_any": one_of(False, False, False, None, True),
        "agent_ids": one_of(True, False),
        "episode_reward": one_of(True, False),
        "return_state": one_of(True, False),
        "categorical_actions": not discrete or one_of(True, False),
        "time_limit": one_of(None, None, 3, 4),
        "group_map": one_of(*maps),
        "absent": one_of("dead", "waiting") if parallel else "dead",
    }
    return Trial(
        "scripted", parallel, options=options, cut=one_of(None, 5), script=script
    )


def compare_with_the_model(trial: Trial) -> None:
    stock = Stock(trial)
    recorded = collect(trial, stock.factory, FRAMES)
    assert compare(trial, stock, recorded) == FRAMES
    script, waits = trial.script, trial.options["absent"] == "waiting"
    reasons = {reason for _, reason in script.ends.values()}
    if not script.lingers and (waits or not (script.waits or "vanished" in reasons)):
        # Otherwise it finds agents that are listed or come back although they left.
        check_env(stock.factory, episodes=1)


@pytest.mark.torchrl_defect("D2b", "D2c")
@pytest.mark.filterwarnings("ignore:scripted_v0. agent")
@pytest.mark.parametrize("first", range(0, 160, 40))
def test_agents_that_act_together(first: int) -> None:
    for seed in range(first, first + 40):
        compare_with_the_model(drawn(seed, parallel=True))


@pytest.mark.torchrl_defect("D2", "D2b")
@pytest.mark.parametrize("first", range(0, 80, 40))
def test_agents_that_act_in_turns(first: int) -> None:
    for seed in range(first, first + 40):
        compare_with_the_model(drawn(seed, parallel=False))
