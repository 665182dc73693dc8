"""An environment for TorchRL's modules: two agents, continuous or discrete actions."""

import sys
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OBSERVATION, ACTION = ("a", "observation"), ("a", "action")
LENGTH = 10


class Noughts(MultiAgentEnv):
    """Episodes of ten frames; the first number is the time, the others are random."""

    def __init__(self, *, discrete: bool = False, one_hot: bool = False) -> None:
        box: Any = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        action: Any = spaces.Discrete(4) if discrete or one_hot else box
        group = GroupDescription(
            ("a_0", "a_1"), box, action, categorical_actions=not one_hot
        )
        self._what = EnvDescription(
            "noughts",
            {"a": group},
            root={"sight": spaces.Box(-9, 99, (3,), np.float32)},
        )

    @property
    def description(self) -> EnvDescription:
        return self._what

    def bind(self, row: Row) -> None:
        self._row = row
        self._flags = Flags(row, self._what)

    def reset_row(self, seed: int) -> None:
        self._time = 0
        self._rng = np.random.default_rng(seed)
        self._flags.clear()
        self._row["a", "mask"].fill(True)
        self._show()

    def step_row(self) -> None:
        self._time += 1
        self._row["a", "reward"].fill(0)
        self._show()
        if self._time == LENGTH:
            self._flags.end_all(terminated=True, truncated=False)

    def _show(self) -> None:
        self._row[OBSERVATION][...] = self._rng.standard_normal((2, 3))
        self._row[OBSERVATION][:, 0] = self._time
        self._row["sight",][...] = self._row[OBSERVATION][0]

    def render(self) -> None:
        return None

    def close(self) -> None:
        self._closed = True


def discrete() -> Noughts:
    return Noughts(discrete=True)


def one_hot() -> Noughts:
    return Noughts(one_hot=True)
