"""Overcooked-AI's kitchens give the data of the library's own environment."""

import importlib.util
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.scripts import run_python

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")
if importlib.util.find_spec("overcooked_ai_py") is None:
    pytest.skip("needs Overcooked-AI", allow_module_level=True)

from family_tools import assert_equal, episodes
from zoo_tools import BoundEnv

from marl_collect import check_env
from marl_collect.envs import OvercookedEnv
from marl_collect.envs.overcooked.provider import FAMILY


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the library's environment, which needs gym and an old NumPy."""
    OvercookedEnv("cramped_room").close()  # imports the package
    monkeypatch.setitem(sys.modules, "gym", gymnasium)
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)
    from overcooked_ai_py.mdp.overcooked_env import OvercookedEnv as Stock
    from overcooked_ai_py.mdp.overcooked_mdp import OvercookedGridworld

    def build(layout: str, horizon: int) -> Any:
        mdp = OvercookedGridworld.from_layout_name(layout)
        env = Stock.from_mdp(mdp, horizon=horizon, info_level=0)
        env._mp = object()  # It would be computed, written to a file and not used.
        return env

    return build


@pytest.mark.parametrize("layout", ["cramped_room", "asymmetric_advantages_tomato"])
def test_the_data_are_those_of_the_library(layout: str, stock: Any) -> None:
    from overcooked_ai_py.mdp.actions import Action

    factory = partial(
        OvercookedEnv, layout, horizon=60, shaping=0.5, info_keys=["shaped_reward"]
    )
    frames = shaped = 0
    for _, episode in episodes(factory, 600, seed=1):
        env = stock(layout, 60)
        for step, actions in enumerate(episode["player", "action"]):
            location = f"{layout}, step {step}"
            observations = np.stack(env.lossless_state_encoding_mdp(env.state))
            assert_equal(episode["player", "observation"][step], observations, location)
            joint_action = [Action.INDEX_TO_ACTION[action] for action in actions]
            _, sparse, over, infos = env.step(joint_action)
            extra = np.array(infos["shaped_r_by_agent"])
            actual = episode["next", "player", "reward"][step]
            assert_equal(actual, sparse + 0.5 * extra, location)
            actual = episode["next", "player", "info", "shaped_reward"][step]
            assert_equal(actual, extra, location)
            observations = np.stack(env.lossless_state_encoding_mdp(env.state))
            assert_equal(
                episode["next", "player", "observation"][step], observations, location
            )
            assert episode["next", "truncated"][step, 0] == over
            assert not episode["next", "terminated"][step, 0]
            shaped += bool(extra.any())
            frames += 1
    assert frames == 600
    assert shaped


def test_both_agents_get_the_reward_of_a_delivered_soup() -> None:
    north, south, east, west, stay, interact = range(6)
    onion = [east, interact, west, north, interact]
    cook = [*onion, *onion, *onion, interact, east]
    waiter = [south, interact, north] + [stay] * (len(cook) - 3)  # with a dish
    waiter += [east, north, interact, south, east, south, interact]
    cook += [stay] * (len(waiter) - len(cook))
    env = BoundEnv(OvercookedEnv("cramped_room", cook_time=1))
    rewards = []
    for actions in zip(waiter, cook, strict=True):
        env.step(player=actions)
        rewards.append(env["player", "reward"].ravel().tolist())
    assert rewards[-1] == [20, 20]
    assert not np.any(rewards[:-1])


def test_layouts_in_one_process_keep_their_recipes() -> None:
    quick = OvercookedEnv("cramped_room", cook_time=3)
    bound = BoundEnv(quick)
    BoundEnv(OvercookedEnv("cramped_room", cook_time=9)).step()
    bound.step()
    lists: Any = quick.env
    assert lists._env._recipes.configuration["cook_time"] == 3


@pytest.mark.parametrize("layout", ["cramped_room", "forced_coordination"])
def test_check_env(layout: str) -> None:
    check_env(partial(OvercookedEnv, layout, horizon=30), episodes=2, steps=40)


def test_the_horizon_is_the_time_limit() -> None:
    for keywords, limit in [({}, 400), ({"horizon": 50}, 50), ({"time_limit": 7}, 7)]:
        assert OvercookedEnv("cramped_room", **keywords).description.time_limit == limit


@pytest.mark.processes
def test_the_package_is_imported_without_gym_and_an_old_numpy() -> None:
    code = """
import sys
from marl_collect.envs import OvercookedEnv
OvercookedEnv("cramped_room").close()
print([name for name in sys.modules if name.partition(".")[0] in ("gym", "pygame")])
"""
    process = run_python("-c", code, check=True, interpreter=True)
    assert process.stdout.strip() == "[]"
    assert process.stderr == ""


def test_layouts_of_two_players_are_listed() -> None:
    tasks = FAMILY.available_tasks()
    assert "overcooked/cramped_room" in tasks
    assert "overcooked/cramped_room_single" not in tasks
    assert FAMILY.settings("overcooked/cramped_room")["horizon"] == 400
    with pytest.raises(ValueError, match="must have 2 players.* has 1"):
        OvercookedEnv("cramped_room_single")
    with pytest.raises(ValueError, match="^$"):
        FAMILY.find_task("overcooked/no_room")
