"""Helpers for tests of PettingZoo environments: they are stepped as the engine does."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from support.zoo import Script, ScriptedEnv

from marl_collect.core.description import allocate
from marl_collect.core.env import MultiAgentEnv
from marl_collect.envs import PettingZooWrapper


class BoundEnv:
    """An environment and its row, stepped as the engine does."""

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env: Any = env  # The tests read what wrappers keep, too.
        self.row = allocate(env.description.row())
        for array in self.row.values():
            array.fill(1)  # before the reset memory may contain anything
        env.bind(self.row)
        env.reset_row(3)

    def step(self, **actions: Any) -> None:
        for group in self.env.description.groups:
            self.row[group, "action"][...] = actions.get(group, 0)
        self.env.step_row()

    def __getitem__(self, key: str | tuple[str, ...]) -> NDArray[Any]:
        return self.row[(key,) if isinstance(key, str) else key]

    def flags(self, *group: str) -> list[list[bool]]:
        names = ("done", "terminated", "truncated")
        return [self.row[(*group, name)].ravel().tolist() for name in names]


def scripted(script: Script | None = None, **keywords: Any) -> BoundEnv:
    return BoundEnv(PettingZooWrapper(ScriptedEnv(script), **keywords))


NESTED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "inner": spaces.Dict({"level": spaces.Discrete(9)}),
        "pair": spaces.Tuple([spaces.Box(0, 9, (1,)), spaces.MultiBinary(2)]),
    }
)


def nested(i: int, step: int, action: Any) -> dict[str, Any]:
    return {
        "image": np.full((2, 2, 3), step, dtype=np.uint8),
        "inner": {"level": i},
        "pair": (np.array([step], dtype=np.float32), np.array([0, 1], dtype=np.int8)),
    }


def legal(i: int, step: int) -> NDArray[np.int8]:
    mask = np.ones(5, dtype=np.int8)
    mask[(i + step) % 5] = 0
    return mask


MASKED = spaces.Dict(
    {"seen": spaces.Box(0, 99, (1,)), "action_mask": spaces.Box(0, 1, (5,), np.int8)}
)


def masked(i: int, step: int, action: Any = None) -> dict[str, Any]:
    return {"seen": np.array([step], np.float32), "action_mask": legal(i, step)}
