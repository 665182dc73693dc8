"""``MeltingpotBase``: rows, flags and limits for MeltingPot's two environments."""

import abc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.envs.common import OneHot
from marl_collect.envs.lab2d.actions import check_chosen
from marl_collect.envs.lab2d.players import (
    LevelOptions,
    PlayerRow,
    group_players,
    observed_names,
    player_rows,
    space_of,
)
from marl_collect.envs.meltingpot.built import BuiltWorld
from marl_collect.envs.meltingpot.settings import WorldSpec
from marl_collect.envs.meltingpot.world import DirectWorld, Targets
from marl_collect.errors import ClosedError

World = DirectWorld | BuiltWorld
"""A running substrate or scenario: takes actions, writes observations."""

_IMAGE_KEY = "RGB"
"""Key of the image of the whole world, as in TorchRL."""


@dataclass(frozen=True)
class MeltingpotOptions(LevelOptions):
    """Options of both environments; see ``MeltingpotEnv``."""

    world_rgb: bool
    truncate_without_reset: bool
    episode_reward: bool


class MeltingpotBase(MultiAgentEnv):
    """An environment that owns a ``World``, which fills its row."""

    has_unused_margin = True
    """Whether videos may cut a black margin: pictures are larger than many maps."""

    @abc.abstractmethod
    def __init__(self, world: World, options: MeltingpotOptions) -> None:
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
        # Negative numbers are huge here, so one comparison finds all invalid actions.
        self._unsigned = self._actions.view(np.uint64)
        self._n_actions = spec.n_actions
        self._steps = 0
        self._over = True
        #: Total duration of all resets in seconds.
        self.reset_seconds = 0.0

    @final
    @property
    @override
    def description(self) -> EnvDescription:
        return self._description

    @final
    @override
    def bind(self, row: Row) -> None:
        self._flags = Flags(row, self._description)
        self._chosen = [
            (self._players[group], row[group, "action"], self._reader(group))
            for group in self._description.groups
        ]
        self._rewards = [
            (self._players[group], row[group, "reward"][:, 0])
            for group in self._description.groups
        ]
        self._sums: list[tuple[Any, Any, NDArray[np.float64]]] = [
            (
                row[group, "reward"],
                row[group, "episode_reward"],
                np.zeros_like(row[group, "reward"], np.float64),
            )
            for group in self._description.groups
            if self._options.episode_reward
        ]
        players = [
            (
                player_row.player,
                name,
                row[player_row.group, "observation", name][player_row.index],
            )
            for player_row in self._player_rows
            for name in observed_names(self._description.groups[player_row.group])
        ]
        image = row[_IMAGE_KEY,] if self._options.world_rgb else None
        self._world.bind(Targets(players, image))  # type: ignore[arg-type]
        self._over = True

    @final
    @override
    def reset_row(self, seed: int) -> None:
        """Begin an episode; ``truncate_without_reset`` continues a running one."""
        if self._closed:
            raise ClosedError(f"This {type(self).__name__} is closed: build a new one.")
        began = time.perf_counter()
        if not (self._options.truncate_without_reset and self._world.running):
            self._over = True  # stays True if the start raises
            self._world.start(seed)
        self._steps = 0
        self._over = False
        self._flags.clear()
        for _, _, total in self._sums:
            total.fill(0)
        self._world.observe()
        self.reset_seconds += time.perf_counter() - began

    @final
    @override
    def step_row(self) -> None:
        """Step with the row's actions.

        Raises:
            RuntimeError: if no episode is running.
            ValueError: if an action is out of range; names the agent.
        """
        if self._over:
            raise RuntimeError(
                f"No episode of {self._description.name} is running: call reset() "
                "first."
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
        for reward, episode_reward, total in self._sums:
            total += reward
            episode_reward[...] = total
        self._steps += 1
        if not world.running:
            truncated = world.truncated
            self._flags.end_all(terminated=not truncated, truncated=truncated)
            self._over = True
        elif self._steps == self._options.max_steps:
            self._flags.truncate()
            self._over = True

    @final
    @override
    def render(self) -> NDArray[np.uint8] | None:
        """Return an image of the whole world, or None before the first reset."""
        return self._world.render()

    @final
    def get_rgb_image(self) -> NDArray[np.uint8] | None:
        """Return ``render()``. The name is TorchRL's."""
        return self._world.render()

    @final
    def events(self) -> Sequence[tuple[str, Any]]:
        """Return Lab2d's events of the last reset or step; scenarios have none."""
        return self._world.events()

    @final
    @override
    def close(self) -> None:
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
    requested = options.observations
    every = sorted(spec.observations)
    names = every if requested is None else list(dict.fromkeys(requested))
    unknown = [name for name in names if name not in spec.observations]
    if unknown or not names:
        raise ValueError(
            f"observations must name at least one observation of {spec.name}, out of "
            f"{every}, but is {names}; unknown: {unknown}. For the image of the whole "
            "world pass world_rgb=True."
        )
    if options.world_rgb and spec.world_image is None:
        raise ValueError(
            f"{spec.name} has no image of the whole world: leave world_rgb out."
        )
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
                episode_reward=options.episode_reward,
            )
            for group, agents in groups.items()
        },
        root=root,
        repeats=False,
        time_limit=min(limits, default=None),
    )


def _player(player_row: PlayerRow) -> int:
    return player_row.player


def _index(players: list[int]) -> slice | NDArray[np.intp]:
    """Return an index that selects these players; a slice if they are contiguous."""
    first = players[0]
    if players == list(range(first, first + len(players))):
        return slice(first, first + len(players))
    return np.array(players)
