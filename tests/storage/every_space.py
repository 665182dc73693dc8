"""An environment with a space of each kind."""

from typing import Any

import numpy as np
from gymnasium import spaces

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags


class EverySpace(MultiAgentEnv):
    """Two steps of two agents; the state has NaN."""

    description = EnvDescription(
        "every",
        {
            "g": GroupDescription(
                ("a", "b"),
                spaces.Dict(
                    image=spaces.Box(0, 255, (20, 16, 3), np.uint8),
                    pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
                    bits=spaces.MultiBinary(3),
                ),
                spaces.MultiDiscrete([2, 3]),
                info={"health": (2,)},
            )
        },
        {"state": spaces.Box(-np.inf, np.inf, (2,), np.float64)},
    )
    is_closed = False

    def bind(self, row: Any) -> None:
        self.row = row
        self.flags = Flags(row, self.description)

    def reset_row(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.steps = 0
        self.flags.clear()
        self.observe()

    def step_row(self) -> None:
        self.steps += 1
        self.row["g", "reward"][:, 0] = [self.steps, 0.5]
        if self.steps == 2:
            self.flags.end_all(terminated=True, truncated=False)
        self.observe()

    def observe(self) -> None:
        row = self.row
        row["state",][...] = self.random.normal(size=2) * [1, np.nan]
        row["g", "observation", "image"][...] = self.random.integers(
            0, 256, (2, 20, 16, 3)
        )
        row["g", "observation", "pair", "0"][...] = self.random.integers(0, 3, 2)
        row["g", "observation", "pair", "1"][...] = self.random.uniform(-1, 1, (2, 2))
        row["g", "observation", "bits"][...] = self.random.integers(0, 2, (2, 3))
        row["g", "info", "health"][...] = self.random.uniform(size=(2, 2))
        row["g", "mask"][...] = True

    def render(self) -> Any:
        return None

    def close(self) -> None:
        pass
