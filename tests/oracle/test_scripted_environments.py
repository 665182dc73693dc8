"""Agents end, join, wait, vanish and come back: a model has every entry."""

from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from stock_replay import Trial, collect, compare
from stock_zoo import Stock, build
from support.disguises import disguised
from support.zoo import Script

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import check_env

AGENTS = [f"agent_{i}" for i in range(4)]
FLAGGED = ["terminated", "truncated", "both"]
FRAMES = 24


def legal(i: int, step: int) -> Any:
    """Return an info with a mask of five actions, one of which is illegal."""
    mask = np.ones(5, np.int8)
    mask[(i + step) % 5] = 0
    return {"action_mask": mask, "speed": [step, i]}


def masked(i: int, step: int, action: Any) -> Any:
    seen = np.array([step, np.sum(action or 0)], np.float64)
    return {"seen": seen, "action_mask": legal(i, step)["action_mask"]}


def deep(i: int, step: int, action: Any) -> Any:
    image = np.full((2, 2, 3), 10 * i + step, np.uint8)
    pair = np.array([step], np.float32), np.array([step % 2, 1], np.int8)
    return {"image": image, "inner": {"level": np.int64(i)}, "pair": pair}


OF_MASKED = spaces.Dict(
    {"seen": spaces.Box(0, 99, (2,), np.float64), "action_mask": spaces.MultiBinary(5)}
)
OF_DEEP = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "inner": spaces.Dict({"level": spaces.Discrete(9)}),
        "pair": spaces.Tuple([spaces.Box(0, 99, (1,)), spaces.MultiBinary(2)]),
    }
)


def sometimes(i: int, step: int) -> Any:
    return {} if step % 2 else {"speed": [step, i]}


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
    *("ends but stays listed", "ends and returns at once"),
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
            # Turn-based agents must be removed first, in a round.
            at_once = "at once" in life and parallel
            end = events["ends"][agent][0]
            events["returns"][agent] = end if at_once else random.randint(8, 10)
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
    seen: dict[str, Any] = one_of({}, {}, {"observation": OF_DEEP, "observe": deep})
    infos = [legal, legal, sometimes, None] if discrete else [sometimes]
    if discrete and one_of(True, False, False):
        seen, infos = {"observation": OF_MASKED, "observe": masked}, [sometimes]
    script = Script(
        n_agents=4,
        **lives(random, parallel=parallel),
        max_cycles=one_of(14, 12, 3, 1),
        action=action,
        info=one_of(*infos),
        **seen,
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


def in_disguise(trial: Trial, seed: int, **options: Any) -> Any:
    return PettingZooWrapper(disguised(build(trial), seed), **options)


def compare_with_the_model(trial: Trial, seed: int) -> None:
    stock = Stock(trial)
    stock.factory = partial(in_disguise, trial, seed, **stock.factory.keywords)
    recorded = collect(trial, stock.factory, FRAMES)
    assert compare(trial, stock, recorded) == FRAMES
    script, waits = trial.script, trial.options["absent"] == "waiting"
    reasons = {reason for _, reason in script.ends.values()}
    stays = any(script.ends[a][0] == back for a, back in script.returns.items())
    if stays or script.lingers:  # It finds agents that are listed although they ended,
        return
    if waits or not (script.waits or "vanished" in reasons):  # or come back unflagged.
        check_env(stock.factory, episodes=1)


@pytest.mark.torchrl_defect("D2b", "D2c")
@pytest.mark.filterwarnings("ignore:scripted_v0. agent")
@pytest.mark.parametrize("first", range(0, 160, 40))
def test_agents_that_act_together(first: int) -> None:
    for seed in range(first, first + 40):
        compare_with_the_model(drawn(seed, parallel=True), seed)


@pytest.mark.torchrl_defect("D2", "D2b")
@pytest.mark.parametrize("first", range(0, 80, 40))
def test_agents_that_act_in_turns(first: int) -> None:
    for seed in range(first, first + 40):
        compare_with_the_model(drawn(seed, parallel=False), seed)
