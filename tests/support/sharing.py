# ruff: noqa: NPY002 - environments here use the global generator.
"""Environments that share something with each other, and odd ones that do not.

All are one game of two agents, with an observation ``[seed, steps, total, draw]`` of
float64: the seed of the episode, its steps, the sum of all actions, and a random number
drawn in this step. ``consistent`` knows what a batch of one of them must look like.
They differ in where they keep the sum, and in where they draw from. Processes of
ParallelEnv import this module, so it does not import torch.
"""

import ctypes
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

if TYPE_CHECKING:
    from tensordict import TensorDictBase

STEPS = 5
SPACE = spaces.Box(-np.inf, np.inf, (4,), np.float64)


class Game(ParallelEnv[Any, Any, Any]):
    """Keeps everything in the object."""

    metadata = {"name": "game_v0"}
    possible_agents: list[Any] = ["player_0", "player_1"]

    def observation_space(self, agent: Any) -> Any:
        return SPACE

    def action_space(self, agent: Any) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.seed, self.steps = seed, 0
        self.begin(seed or 0)
        self.write(0)
        return self.observe(0.0), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        self.write(self.read() + int(sum(actions.values())))
        over = self.steps == STEPS
        results: Any = (
            self.observe(self.draw()),
            dict.fromkeys(self.agents, float(sum(actions.values()))),
            dict.fromkeys(self.agents, over),
            dict.fromkeys(self.agents, False),
            {agent: {} for agent in self.agents},
        )
        if over:
            self.agents = []
        return results

    def observe(self, draw: float) -> dict[Any, Any]:
        numbers = np.array([self.seed, self.steps, self.read(), draw], np.float64)
        return dict.fromkeys(self.agents, numbers)

    def begin(self, seed: int) -> None:
        """Seed what the game draws from."""

    def draw(self) -> float:
        return 0.0

    def write(self, total: int) -> None:
        self.total = total

    def read(self) -> int:
        return self.total


class InClassList(Game):
    """Keeps the sum in a list in the body of the class."""

    totals: ClassVar[list[int]] = [0]

    def write(self, total: int) -> None:
        self.totals[0] = total

    def read(self) -> int:
        return self.totals[0]


class InClassDict(Game):
    """Keeps the sum in a dict in the body of the class."""

    totals: ClassVar[dict[str, int]] = {}

    def write(self, total: int) -> None:
        self.totals["now"] = total

    def read(self) -> int:
        return self.totals["now"]


TOTAL = 0


class InModule(Game):
    """Keeps the sum in a global of the module."""

    def write(self, total: int) -> None:
        global TOTAL
        TOTAL = total

    def read(self) -> int:
        return TOTAL


class Board:
    """Something mutable that is built once."""

    total = 0


@lru_cache
def board() -> Board:
    """Return the one board."""
    return Board()


class InCache(Game):
    """Keeps the sum in an object that a cached function returns."""

    def __init__(self) -> None:
        self.board = board()

    def write(self, total: int) -> None:
        self.board.total = total

    def read(self) -> int:
        return self.board.total


class InFile(Game):
    """Keeps the sum in a file, which has the same path for all."""

    path = Path(tempfile.gettempdir()) / "marl_collect_test_total"

    def write(self, total: int) -> None:
        self.path.write_text(str(total), encoding="utf-8")

    def read(self) -> int:
        return int(self.path.read_text(encoding="utf-8") or 0)


class InLibrary(Game):
    """Keeps the sum in a C library, which has a single world: libc's environment."""

    def write(self, total: int) -> None:
        ctypes.CDLL(None).setenv(b"MARL_COLLECT_TEST_TOTAL", str(total).encode(), 1)

    def read(self) -> int:
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        return int(getenv(b"MARL_COLLECT_TEST_TOTAL"))


class FromNumPy(Game):
    """Draws from NumPy's global generator."""

    def begin(self, seed: int) -> None:
        np.random.seed(seed)

    def draw(self) -> float:
        return float(np.random.random_sample())


class FromPython(Game):
    """Draws from Python's global generator."""

    def begin(self, seed: int) -> None:
        random.seed(seed)

    def draw(self) -> float:
        return random.random()


class FromTorch(Game):
    """Draws from torch's global generator."""

    def begin(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def draw(self) -> float:
        import torch

        return float(torch.rand((), dtype=torch.float64))


class OwnGenerator(Game):
    """Draws from a generator of its own."""

    def begin(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def draw(self) -> float:
        return float(self.random.random_sample())


class RestoresGenerator(FromNumPy):
    """Draws from NumPy's global generator, and leaves it as it was."""

    def begin(self, seed: int) -> None:
        before = np.random.get_state()
        super().begin(seed)
        self.state = np.random.get_state()
        np.random.set_state(before)

    def draw(self) -> float:
        before = np.random.get_state()
        np.random.set_state(self.state)
        number = super().draw()
        self.state = np.random.get_state()
        np.random.set_state(before)
        return number


@lru_cache
def identity(number: int) -> int:
    """Return the number; a function that only remembers."""
    return number


MEMO: dict[int, int] = {}


class Remembers(Game):
    """Fills a cache and a table in the module, which change no result."""

    table: ClassVar[dict[int, int]] = {n: n for n in range(99)}

    def read(self) -> int:
        return MEMO.setdefault(self.table[self.total], identity(self.total))


class OneArray(Game):
    """Returns the same arrays in every step, and changes one list of agents."""

    def __init__(self) -> None:
        self.array = np.zeros(4)
        self.agents = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        listed = self.agents
        returned = super().reset(seed, options)
        listed[:], self.agents = self.agents, listed
        return returned

    def observe(self, draw: float) -> dict[Any, Any]:
        self.array[:] = [self.seed or 0, self.steps, self.read(), draw]
        return dict.fromkeys(self.agents, self.array)


class ReadOnly(Game):
    """Returns arrays that nobody may write, and flags and rewards of NumPy."""

    def observe(self, draw: float) -> dict[Any, Any]:
        observed = super().observe(draw)
        for array in observed.values():
            array.flags.writeable = False
        return observed

    def step(self, actions: Any) -> Any:
        observed, rewards, terminated, truncated, infos = super().step(actions)
        return (
            observed,
            {agent: np.float32(reward) for agent, reward in rewards.items()},
            {agent: np.bool_(flag) for agent, flag in terminated.items()},
            {agent: np.array(flag) for agent, flag in truncated.items()},
            defaultdict(dict, infos),
        )


class NumberedAgents(Game):
    """Has agents whose names are numbers."""

    possible_agents: list[Any] = [0, 1]


_DRAWS: dict[type[Game], Callable[[int], list[float]]] = {}


def _numpy(seed: int) -> list[float]:
    return np.random.RandomState(seed).random_sample(STEPS).tolist()


def _python(seed: int) -> list[float]:
    own = random.Random(seed)
    return [own.random() for _ in range(STEPS)]


def _torch(seed: int) -> list[float]:
    import torch

    own = torch.Generator().manual_seed(seed)
    return [
        float(torch.rand((), dtype=torch.float64, generator=own)) for _ in range(STEPS)
    ]


_DRAWS |= {
    FromNumPy: _numpy,
    FromPython: _python,
    FromTorch: _torch,
    OwnGenerator: _numpy,
    RestoresGenerator: _numpy,
}


def consistent(batch: "TensorDictBase", kind: type[Game]) -> bool:
    """Return whether ``batch``, ``[B, T]`` from resets on, has no foreign data."""
    import torch

    draws = _DRAWS.get(kind, lambda seed: [0.0] * STEPS)
    names = batch.keys(True)
    agents = [key for key in batch.keys() if ("next", key, "reward") in names]
    before, after, actions = (
        torch.cat([source[g, name] for g in agents], 2)
        for source, name in (
            (batch, "observation"),
            (batch["next"], "observation"),
            (batch, "action"),
        )
    )
    for environment in range(len(batch)):
        total, expected = 0.0, [0.0, 0.0, 0.0, 0.0]
        for t in range(batch.shape[1]):
            seen = before[environment, t]
            if t % STEPS == 0:
                total, seed = 0.0, float(seen[0, 0])
                expected = [seed, 0.0, 0.0, 0.0]
            total += float(actions[environment, t].sum())
            now = [seed, t % STEPS + 1.0, total, draws(int(seed))[t % STEPS]]
            rows = seen.tolist() + after[environment, t].tolist()
            if rows != [expected] * len(seen) + [now] * len(seen):
                return False
            expected = now
    return True
