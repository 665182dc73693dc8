"""Level-based foraging gives the library's data, with a seed that determines them."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")
pytest.importorskip("lbforaging", reason="needs the extra lbforaging")

from family_tools import assert_lists_equal, episodes

from marl_collect import check_env
from marl_collect.envs import AgentLists, LbForagingEnv, PettingZooWrapper
from marl_collect.envs.lbforaging.provider import FAMILY

SMALL = "Foraging-5x5-3p-1f-v3"


def stock(task: str) -> Any:
    # New players have no position, so a new environment has no seed defect.
    return gymnasium.make(task, disable_env_checker=True)


def flags(env: Any, over: bool, frame: int) -> tuple[bool, bool]:
    empty = not env.unwrapped.field.any()
    assert over == (empty or frame == 50)
    return empty, frame == 50


@pytest.mark.parametrize("task", [SMALL, "Foraging-2s-8x8-2p-3f-coop-v3"])
def test_the_data_are_those_of_the_library(task: str) -> None:
    lengths = []
    for seed, episode in episodes(partial(LbForagingEnv, task), 300):
        lengths.append(assert_lists_equal(episode, stock(task), seed, flags))
    assert sum(lengths) == 300
    assert len(lengths) >= 6


def test_episodes_end_for_both_reasons() -> None:
    ends = set()
    for _, episode in episodes(partial(LbForagingEnv, SMALL), 600):
        ends.add(tuple(bool(episode["next", n][-1, 0]) for n in ("terminated", "done")))
    assert (True, True) in ends  # no food left
    assert (False, True) in ends  # the time limit


def test_the_last_food_in_the_frame_of_the_limit_is_a_termination() -> None:
    env = LbForagingEnv(SMALL, max_episode_steps=1)
    env.set_seed(0)
    root = env.reset()
    wrapped_env: Any = env.env
    wrapped_env._env.unwrapped.field[:] = 0
    data = env.step(root.update(env.rand_action(root.clone())))
    assert data["next", "terminated"].item()
    assert data["next", "truncated"].item()
    env.close()


@pytest.mark.parametrize(
    "keywords",
    [{}, {"agent_ids": True, "time_limit": 9}],
)
def test_check_env(keywords: dict[str, Any]) -> None:
    check_env(partial(LbForagingEnv, SMALL, **keywords), episodes=2, steps=60)


def test_the_library_alone_depends_on_earlier_episodes() -> None:
    """If this fails, the repair of the reset is no longer needed."""

    def first(env: Any, before: int) -> Any:
        for seed in range(before):
            env.reset(seed=seed)
        return np.array(env.reset(seed=7)[0])

    tasks = [first(stock("Foraging-5x5-4p-2f-v3"), before) for before in range(9)]
    assert any(not np.array_equal(tasks[0], other) for other in tasks[1:])


def test_a_time_limit_makes_a_truncation_of_a_stock_environment() -> None:
    def wrapped(**keywords: Any) -> PettingZooWrapper:
        env = stock("Foraging-8x8-2p-3f-coop-v3")
        return PettingZooWrapper(AgentLists(env), repeats=False, **keywords)

    for keywords, terminated in (({}, True), ({"time_limit": 50}, False)):
        env = wrapped(**keywords)
        env.set_seed(0)
        last = env.rollout(60)[-1]["next"]
        assert last["terminated"].item() is terminated
        assert last["truncated"].item() is not terminated


def test_any_registered_task_is_found_and_some_are_listed() -> None:
    assert all(task.startswith("lbforaging/") for task in FAMILY.available_tasks())
    for task in FAMILY.available_tasks():
        FAMILY.find_task(task)
    env = FAMILY.find_task("lbforaging/Foraging-5x5-2p-1f-v3")(max_num_food=2)
    assert env.observation_space["agent"]["observation"].shape == (2, 12)
    assert env.description.name == "Foraging-5x5-2p-1f-v3"
    assert FAMILY.settings("lbforaging/Foraging-5x5-2p-1f-v3")["max_num_food"] == 1
    for name in ("Foraging-5x5-2p-1f-v3", "lbforaging/CartPole-v1", "lbforaging/no"):
        with pytest.raises(ValueError, match="^$"):
            FAMILY.find_task(name)
