"""Tasks of a curriculum reach the episodes that they are recorded with."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from marl_collect import Collector
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.envs.agent_lists import AgentLists
from marl_collect.envs.gymnasium_vector import GymnasiumVectorEnv
from marl_collect.envs.pettingzoo.env import PettingZooWrapper


class Room(gym.Env[Any, Any]):
    """Two agents in lists, who see the task."""

    observation_space = spaces.Tuple([spaces.Box(-np.inf, np.inf, (1,))] * 2)
    action_space = spaces.Tuple([spaces.Discrete(2)] * 2)
    task = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        return self._observed(), [0.0, 0.0], True, False, {}

    def _observed(self) -> Any:
        return tuple(np.full(1, self.task, np.float32) for _ in range(2))


class Tasks(gym.Wrapper[Any, Any, Any, Any]):
    def set_task(self, task: int) -> None:
        self.unwrapped.task = task  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrappers", [0, 1, 2])
def test_set_task_is_found_below_wrappers_of_gymnasium(wrappers: int) -> None:
    def make() -> PettingZooWrapper:
        env: Any = Tasks(Room())
        for _ in range(wrappers):
            env = gym.Wrapper(env)
        return PettingZooWrapper(AgentLists(env))

    with Collector(
        make, frames_per_batch=4, curriculum=lambda *_: 5, level=1, seed=0
    ) as collector:
        batch = collector.next()
    assert (batch["agent", "observation"] == 5).all()


class Numbers(gym.Env[Any, Any]):
    """One agent, who sees the task, for three frames."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.task = 0, (options or {"number": -1})["number"]
        return np.full(1, self.task, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(1, self.task, np.float32), 0.0, self.time == 3, False, {}


def gymnasium(mode: AutoresetMode, *, seeds: bool) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(
        SyncVectorEnv([Numbers] * 2, autoreset_mode=mode), seeds=seeds
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: EnvWrapper(gymnasium(AutoresetMode.SAME_STEP, seeds=False)),
        *(
            partial(gymnasium, mode, seeds=seeds)
            for mode in AutoresetMode
            for seeds in (False, True)
        ),
    ],
)
def test_every_episode_has_its_task_where_the_simulator_resets(make: Any) -> None:
    def curriculum(seed: int, episode: int, level: int) -> Any:
        del seed
        return {"number": 100 * level + episode}

    with Collector(
        make, frames_per_batch=24, curriculum=curriculum, level=1, seed=0
    ) as collector:
        for level in (1, 2, 3):
            collector.set_level(level)
            batch = collector.next()
            episodes = batch["collector", "traj_ids"] & 0xFFFFFFFF
            expected = 100 * batch["collector", "level"] + episodes
            for root in (batch, batch["next"]):
                seen = root[next(iter(collector.description.groups)), "observation"]
                assert (seen.squeeze(-1).squeeze(-1) == expected).all()
    assert batch["collector", "level"].max() == 3
