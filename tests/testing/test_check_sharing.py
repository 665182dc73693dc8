# ruff: noqa: NPY002 - environments here use the global generator.
"""check_env reports what environments of one process share outside of themselves.

All are one game of two agents, with an observation ``[seed, steps, total, draw]`` of
float64: the seed of the episode, its steps, the sum of all actions, and a random number
drawn in this step. They differ in where they keep the sum, and in where they draw from.
"""

import ctypes
import random
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

import torch
from pettingzoo import ParallelEnv

from marl_collect import ContractError, check_env
from marl_collect.envs import PettingZooWrapper

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

    path: ClassVar[Path]

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
        torch.manual_seed(seed)

    def draw(self) -> float:
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


def wrapped(kind: type[Game]) -> Any:
    return PettingZooWrapper(kind())


_ONE_GLOBAL = "They share what changes in an episode: "
REPORTED: dict[type[Game], str] = {
    InClassList: f"{_ONE_GLOBAL}the class attribute InClassList.totals",
    InClassDict: f"{_ONE_GLOBAL}the class attribute InClassDict.totals",
    InModule: f"{_ONE_GLOBAL}the global {__name__}.TOTAL",
    InCache: f"{_ONE_GLOBAL}the attribute InCache.board",
    InFile: "Look for state outside of the object: .* files",
    InLibrary: "Look for state outside of the object: .* libraries",
    FromNumPy: r"They draw from NumPy's global generator \(np.random\)",
    FromPython: r"They draw from Python's global generator \(random\)",
    FromTorch: "They draw from torch's global generator",
}


@pytest.mark.parametrize("episodes", [1, 2, 3])
@pytest.mark.parametrize("kind", REPORTED)
def test_what_environments_share_is_reported(
    kind: type[Game],
    episodes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InFile, "path", tmp_path / "total", raising=False)
    before = states()
    with pytest.raises(ContractError) as raised:
        check_env(partial(wrapped, kind), episodes=episodes)
    (finding,) = raised.value.findings
    assert "Two environments of one process change each other's episodes" in finding
    assert re.search(r"player/observation differs in step [1-3]", finding)
    assert re.search(REPORTED[kind], finding)
    if issubclass(kind, (InClassList, InCache)):  # The search for causes draws, too.
        assert states() == before


def states() -> tuple[Any, list[int]]:
    numbers: Any = np.random.get_state()[1]
    return random.getstate(), numbers.tolist()


@pytest.mark.parametrize("kind", [Game, OwnGenerator, RestoresGenerator, Remembers])
def test_odd_ones_that_share_nothing_pass(kind: type[Game]) -> None:
    check_env(partial(wrapped, kind))
