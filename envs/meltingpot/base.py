"""What MeltingPot's two environments share: rows, flags and limits around a world."""

import abc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.lab2d.actions import check_chosen
from marl_collect.envs.lab2d.players import (
    PlayerRow,
    group_players,
    player_rows,
    space_of,
)
from marl_collect.envs.meltingpot.settings import WorldSpec
from marl_collect.envs.meltingpot.world import MeltingpotWorld, Targets
from marl_collect.envs.one_hot import OneHot
from marl_collect.errors import ClosedError

_IMAGE_KEY = "RGB"
"""Where TorchRL puts the picture of the whole world."""


@dataclass(frozen=True)
class MeltingpotOptions:
    """What both environments take; see there."""

    max_steps: int | None
    categorical_actions: bool
    group_map: GroupMap | MarlGroupMapType | str | None
    observations: Sequence[str] | None
    world_rgb: bool
    truncate_without_reset: bool

    def __post_init__(self) -> None:
        """Check what can be checked alone."""
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, but is {self.max_steps}.")
        if isinstance(self.observations, str):
            raise TypeError(
                f"observations is a sequence of names, such as [{self.observations!r}]."
            )


class MeltingpotBase(MultiAgentEnv):
    """One row, filled by a ``MeltingpotWorld`` that it owns."""

    @abc.abstractmethod
    def __init__(self, world: MeltingpotWorld, options: MeltingpotOptions) -> None:
        """Own ``world``."""
        self._world = world
        self._options = options
        spec = world.spec
        groups = group_players(options.group_map, spec.n_players, spec.roles)
        self._player_rows: list[PlayerRow] = list(player_rows(groups))
        self._description = _describe(spec, groups, options)
        self._agents = [
            player_row.agent for player_row in sorted(self._player_rows, key=_player)
        ]
        self._players = {
            group: _index([s.player for s in self._player_rows if s.group == group])
            for group in groups
        }
        self._actions = np.zeros(spec.n_players, np.int64)
        # Negative numbers are huge here: one comparison finds all that is wrong.
        self._unsigned = self._actions.view(np.uint64)
        self._n_actions = spec.n_actions
        self._steps = 0
        self._over = True
        self._closed = False
        #: Seconds that all resets together took.
        self.reset_seconds = 0.0

    @final
    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and promises; a seed does not determine an episode here."""
        return self._description

    @final
    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closed

    @final
    def bind(self, row: Row) -> None:
        """Read actions from and write everything else to ``row`` from now on."""
        self._flags = Flags(row, self._description)
        self._chosen = [
            (self._players[group], row[group, "action"], self._reader(group))
            for group in self._description.groups
        ]
        self._rewards = [
            (self._players[group], row[group, "reward"][:, 0])
            for group in self._description.groups
        ]
        players = [
            (
                player_row.player,
                name,
                row[player_row.group, "observation", name][player_row.index],
            )
            for player_row in self._player_rows
            for name in _observed(self._description.groups[player_row.group])
        ]
        image = row[_IMAGE_KEY,] if self._options.world_rgb else None
        self._world.bind(Targets(players, image))  # type: ignore[arg-type]
        self._over = True

    @final
    def reset_row(self, seed: int) -> None:
        """Begin an episode, or go on with the running one, as the class says."""
        if self._closed:
            raise ClosedError(f"This {type(self).__name__} is closed: build another.")
        began = time.perf_counter()
        if not (self._options.truncate_without_reset and self._world.running):
            self._over = True  # stays so if the start raises
            self._world.start(seed)
        self._steps = 0
        self._over = False
        self._flags.clear()
        self._world.observe()
        self.reset_seconds += time.perf_counter() - began

    @final
    def step_row(self) -> None:
        """Step with the row's actions.

        Raises:
            RuntimeError: if the episode is over.
            ValueError: naming the agent, for an action that does not exist.
        """
        if self._over:
            raise RuntimeError(
                f"The episode of {self._description.name} is over or was never begun: "
                "call reset() first."
            )
        actions = self._actions
        for players, chosen, one_hot in self._chosen:
            actions[players] = one_hot.numbers(chosen) if one_hot else chosen
        if self._unsigned.max() >= self._n_actions:
            check_chosen(actions, self._n_actions, self._agents)
        world = self._world
        world.step(actions)
        world.observe()
        for players, target in self._rewards:
            target[...] = world.rewards[players]
        self._steps += 1
        if not world.running:
            truncated = world.truncated
            self._flags.end_all(terminated=not truncated, truncated=truncated)
            self._over = True
        elif self._steps == self._options.max_steps:
            self._flags.truncate()
            self._over = True

    @final
    def render(self) -> NDArray[np.uint8] | None:
        """Return the picture of the whole world, or None before the first reset."""
        return self._world.render()

    @final
    def get_rgb_image(self) -> NDArray[np.uint8] | None:
        """Return what ``render`` returns, under TorchRL's name."""
        return self._world.render()

    @final
    def events(self) -> Sequence[tuple[str, Any]]:
        """Return Lab2d's events of the last reset or step; a scenario tells none."""
        return self._world.events()

    @final
    def close(self) -> None:
        """Give the world back."""
        self._closed = True
        self._over = True
        self._world.close()

    def _reader(self, name: str) -> OneHot | None:
        group = self._description.groups[name]
        if not group.one_hot:
            return None
        return OneHot((name, "action"), group.agents, self._n_actions)


def _describe(
    spec: WorldSpec, groups: dict[str, tuple[str, ...]], options: MeltingpotOptions
) -> EnvDescription:
    asked = options.observations
    every = sorted(spec.observations)
    names = every if asked is None else list(dict.fromkeys(asked))
    unknown = [name for name in names if name not in spec.observations]
    if unknown or not names:
        raise ValueError(
            f"The players of {spec.name} have no observation {unknown}: expected at "
            f"least one of {every}. The picture of the whole "
            "world is asked for with world_rgb=True."
        )
    if options.world_rgb and spec.world_image is None:
        raise ValueError(f"{spec.name} shows no picture of the whole world.")
    observed: dict[str, spaces.Space[Any]] = {
        name: space_of(spec.observations[name]) for name in names
    }
    root: dict[str, spaces.Space[Any]] = {}
    if options.world_rgb and spec.world_image is not None:
        root[_IMAGE_KEY] = space_of(spec.world_image)
    limits = [n for n in (options.max_steps, spec.time_limit) if n is not None]
    return EnvDescription(
        name=spec.name,
        groups={
            group: GroupDescription(
                agents=agents,
                observation=spaces.Dict(observed),
                action=spaces.Discrete(spec.n_actions),
                categorical_actions=options.categorical_actions,
                mask=False,
            )
            for group, agents in groups.items()
        },
        root=root,
        repeats=False,
        time_limit=min(limits, default=None),
    )


def _observed(group: GroupDescription) -> list[str]:
    assert isinstance(group.observation, spaces.Dict)
    return list(group.observation.spaces)


def _player(player_row: PlayerRow) -> int:
    return player_row.player


def _index(players: list[int]) -> slice | NDArray[np.intp]:
    """Return what picks these players out of an array: a slice where one will do."""
    first = players[0]
    if players == list(range(first, first + len(players))):
        return slice(first, first + len(players))
    return np.array(players)
