"""An environment in which everything that a learner must take into account is drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.training.options import Setup

PICTURE = (32, 32, 3)


@dataclass(frozen=True)
class Kind:
    """What is drawn."""

    groups: Mapping[str, int]  # number of agents of each group
    continuous: tuple[str, ...] = ()  # have Box actions; the others Discrete ones
    turns: bool = False  # whether one agent acts per frame, and the others wait
    deaths: float = 0.0  # probability that an agent ends in a frame
    returns: float = 0.0  # probability that an agent that ended acts again
    length: int = 9  # frames of an episode that does not end early
    truncates: bool = True  # whether this is a time limit; else terminated
    action_mask: bool = False  # whether Discrete actions may be illegal
    picture: bool = False  # whether there is a picture beside the vector
    done_on_any: bool = False  # whether an episode ends with the first agent


def draw_kind(
    pick: Random, groups: Mapping[str, int], *, discrete: bool = True, **more: Any
) -> Kind:
    """Draw an environment with these groups."""
    return Kind(
        groups=groups,
        deaths=pick.choice([0.0, 0.15]),
        returns=pick.choice([0.0, 0.3]),
        length=pick.choice([4, 7, 30]),
        truncates=pick.random() < 0.6,
        action_mask=discrete and pick.random() < 0.5,
        picture=pick.random() < 0.25,
        done_on_any=pick.random() < 0.2,
        **more,
    )


def draw_setup(pick: Random, algorithm: str) -> Setup:
    """Draw a setup of an algorithm."""
    return Setup(
        algorithm,
        centralised=pick.random() < 0.4,
        share_params=pick.random() < 0.5,
        agent_ids=pick.random() < 0.4,
    )


def noted_draws(learner: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of what a learner takes from its replay buffer from now on."""
    taken: list[Any] = []
    take = learner.replay.take

    def noted(rows: Any) -> Any:
        taken.append(rows.tolist())
        return take(rows)

    monkeypatch.setattr(learner.replay, "take", noted)
    return taken


def assert_varied(cases: list[dict[str, Any]], table: Mapping[str, str]) -> None:
    """Assert that names have several values in the cases where others are true."""
    for conditions, names in table.items():
        some = [case for case in cases if all(case[n] for n in conditions.split())]
        for name in names.split():
            assert combinations(some, name) > 1, (conditions, name)


def combinations(cases: list[dict[str, Any]], *names: str) -> int:
    """Return how many combinations of the values of these names the cases have."""
    return len({tuple(case[name] for name in names) for case in cases})


class DrawnEnv(MultiAgentEnv):
    """Observations, rewards, deaths, turns and masks come from the episode's seed."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.groups = {
            name: GroupDescription(
                agents=tuple(f"{name}_{i}" for i in range(n)),
                observation=_observation(kind),
                action=_action(name in kind.continuous),
                action_mask=kind.action_mask and name not in kind.continuous,
            )
            for name, n in kind.groups.items()
        }
        self._description = EnvDescription(
            "drawn", self.groups, done_on_any=kind.done_on_any
        )

    @property
    def description(self) -> EnvDescription:
        return self._description

    def bind(self, row: Row) -> None:
        self.row: Any = row
        self.flags = Flags(row, self._description)

    def reset_row(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.steps = 0
        self.flags.clear()
        self._write()

    def step_row(self) -> None:
        self.steps += 1
        for name in self.groups:
            alive = ~self.row[name, "done"][:, 0]
            rewards = self.random.normal(size=len(alive))
            self.row[name, "reward"][:, 0] = np.where(alive, rewards, 0)
            for agent in np.flatnonzero(~alive):
                if self.random.random() < self.kind.returns:
                    self.flags.revive(name, int(agent))
            for agent in np.flatnonzero(alive):
                if self.random.random() < self.kind.deaths:
                    truncated = bool(self.random.random() < 0.3)
                    self.flags.end(
                        name, int(agent), terminated=not truncated, truncated=truncated
                    )
        self._write()
        if self.steps == self.kind.length:
            limit = self.kind.truncates
            self.flags.end_all(terminated=not limit, truncated=limit)
        else:
            self.flags.settle()

    def _write(self) -> None:
        alive = {name: ~self.row[name, "done"][:, 0] for name in self.groups}
        everybody = [
            (name, int(i)) for name in alive for i in np.flatnonzero(alive[name])
        ]
        turn = everybody[self.random.integers(len(everybody))] if everybody else None
        for name, lives in alive.items():
            acts = lives.copy()
            if self.kind.turns:
                acts[:] = [(name, i) == turn for i in range(len(acts))]
            self.row[name, "mask"][:] = acts
            observed = self.row[name, "observation", "vector"]
            noise = self.random.normal(size=observed.shape)
            observed[:] = np.where(lives[:, None], noise, 0)
            if self.kind.picture:
                pixels = self.random.integers(256, size=(len(lives), *PICTURE))
                picture = pixels * lives[:, None, None, None]
                self.row[name, "observation", "picture"][:] = picture
            if (name, "action_mask") in self.row:
                legal = self.random.random((len(lives), 4)) < 0.6
                legal[
                    np.arange(len(lives)), self.random.integers(4, size=len(lives))
                ] = 1
                self.row[name, "action_mask"][:] = legal | ~acts[:, None]


def _observation(kind: Kind) -> Any:
    subspaces: dict[str, Any] = {"vector": spaces.Box(-np.inf, np.inf, (3,))}
    if kind.picture:
        subspaces["picture"] = spaces.Box(0, 255, PICTURE, np.uint8)
    return spaces.Dict(subspaces)


def _action(continuous: bool) -> Any:
    return spaces.Box(-2, 1, (2,)) if continuous else spaces.Discrete(4)
