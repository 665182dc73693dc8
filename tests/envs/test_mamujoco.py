"""MaMuJoCo gives the data of gymnasium-robotics' own environment."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")
pytest.importorskip("mujoco", reason="needs the extra mamujoco")
pytest.importorskip("gymnasium_robotics", reason="needs the extra mamujoco")

from family_tools import assert_equal, episodes
from gymnasium_robotics import mamujoco_v1

from marl_collect import check_env
from marl_collect.envs import MamujocoEnv
from marl_collect.envs.mamujoco.provider import FAMILY


@pytest.mark.parametrize(
    ("task", "arguments", "end"),
    [
        ("Ant-4x2", {"max_episode_steps": 40}, "truncated"),
        ("Hopper-3x1", {"agent_obsk": 0}, "terminated"),
        ("Swimmer-2x1", {"max_episode_steps": 30}, "truncated"),
    ],
)
def test_the_data_are_those_of_the_library(
    task: str, arguments: dict[str, Any], end: str
) -> None:
    stock = mamujoco_v1.parallel_env(*task.split("-"), **arguments)
    factory = partial(MamujocoEnv, task, **arguments)
    with factory() as env:
        groups = env.group_map.items()
    rows = {agent: (g, row) for g, names in groups for row, agent in enumerate(names)}
    frames = ends = 0
    for seed, episode in episodes(factory, 120):
        observed, _ = stock.reset(seed=seed)
        length = len(episode["done",])
        for step in range(length):
            actions = {
                a: episode[g, "action"][step, row] for a, (g, row) in rows.items()
            }
            after, rewards, terminated, truncated, _ = stock.step(actions)
            for agent, (group, row) in rows.items():
                location = f"{task}: seed {seed}, step {step}, {agent}"
                actual = episode[group, "observation"][step, row]
                assert_equal(actual, observed[agent], location)
                actual = episode["next", group, "observation"][step, row]
                assert_equal(actual, after[agent], location)
                actual = episode["next", group, "reward"][step, row]
                assert_equal(actual, rewards[agent], location)
                flags = {"terminated": terminated, "truncated": truncated}
                for name, values in flags.items():
                    assert episode["next", group, name][step, row, 0] == values[agent]
            observed = after
        ends += bool(episode["next", end][-1, 0])
        frames += length
    stock.close()
    assert frames == 120
    assert ends >= 2


@pytest.mark.parametrize("task", ["Ant-2x4d", "Walker2d-2x3"])
def test_check_env(task: str) -> None:
    check_env(partial(MamujocoEnv, task, max_episode_steps=20), episodes=2, steps=25)


def test_the_limit_is_that_of_the_robot() -> None:
    for task, keywords, limit in [
        ("Reacher-2x1", {}, 50),
        ("Ant-2x4", {}, 1000),
        ("Ant-2x4", {"time_limit": 30}, 30),
    ]:
        env = FAMILY.find_task(f"mamujoco/{task}")(**keywords)
        assert env.description.time_limit == limit
        env.close()


def test_tasks_that_the_library_builds_wrongly_are_not_found() -> None:
    assert len(FAMILY.available_tasks()) == 11
    for task in ("mamujoco/Pusher-3p", "mamujoco/Ant-3x3", "Ant-2x4"):
        with pytest.raises(ValueError, match="^$"):
            FAMILY.find_task(task)
