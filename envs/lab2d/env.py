"""``Lab2dEnv``: levels that dmlab2d ships, and custom ones."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.common import closed_on_error, options_of
from marl_collect.envs.lab2d.actions import (
    GroupActions,
    NativeGroupActions,
    PlayerGroup,
    Table,
    TableGroupActions,
)
from marl_collect.envs.lab2d.players import (
    REWARD,
    LevelOptions,
    LevelSpec,
    group_players,
    observed_names,
    player_of,
    player_rows,
    space_of,
)
from marl_collect.envs.lab2d.world import Lab2dWorld, import_dmlab2d
from marl_collect.options import Option, require

_IMAGE = "WORLD.RGB"


@final
class Lab2dEnv(MultiAgentEnv):
    """A level of Lab2d, whose players are the agents ``player_0``, ``player_1``, ...

    =========================================  =======================================
    key                                        contents
    =========================================  =======================================
    ``(g, "observation", NAME)``               Lab2d's ``"<i>.NAME"``, ``[n, *shape]``
                                               with its dtype; a scalar is ``[n, 1]``
    ``NAME``                                   a requested observation that belongs to
                                               no player, such as ``"WORLD.RGB"``
    ``(g, "reward")``                          ``"<i>.REWARD"``, or the single reward
                                               of the level for every agent
    ``(g, "action")``                          see below
    =========================================  =======================================

    A player's discrete actions, sorted by name, form a ``MultiDiscrete`` space, or
    ``Discrete`` if there is only one. They count from 0, whatever Lab2d's minimum is.
    Continuous actions form a ``Box``. A level with both kinds has a Dict of
    ``"discrete"`` and ``"continuous"``. A table of ``actions`` replaces them with one
    ``Discrete`` space. Text actions are always empty.

    A level whose actions have no player prefix has one agent, which observes
    everything and takes all actions.

    The same seed and actions give the same episode, with two exceptions: levels that
    keep state across episodes (see ``rebuild``), and levels with the setting
    ``env_seed``, which all levels made with MeltingPot's Lua modules have. The latter
    never repeat an episode, and ``description.repeats`` is False.

    An episode that ends at the level's own frame limit (its setting
    ``episodeLengthFrames`` or ``maxEpisodeLengthFrames``) or at ``max_steps`` is
    ``truncated``; any other is ``terminated``.

    Example:
        >>> env = Lab2dEnv("commons_harvest", {"numPlayers": 2}, observations=["RGB"])
        >>> env.group_map
        {'agents': ['player_0', 'player_1']}
        >>> env.close()

    Attributes:
        reset_seconds: total duration of all resets in seconds.
    """

    reset_seconds: float

    def __init__(
        self,
        level: str,
        settings: Mapping[str, Any] | None = None,
        *,
        observations: Sequence[str] | None = None,
        actions: Table | None = None,
        group_map: GroupMap
        | MarlGroupMapType
        | None = MarlGroupMapType.ALL_IN_ONE_GROUP,
        max_steps: int | None = None,
        categorical_actions: bool = True,
        rebuild: bool = False,
    ) -> None:
        """Build the level.

        Args:
            level: name of the level, Lab2d's ``levelName``.
            settings: settings of the level; mappings and lists may be nested. A level
                that dmlab2d does not ship needs ``levelDirectory``.
            observations: names without the player's prefix (``"RGB"``), and full names
                of observations that belong to no player (``"WORLD.RGB"``). Lab2d
                computes only these. None: all numeric observations of the players.
            actions: table of discrete actions; action ``i`` sets the values in
                ``actions[i]``, whose names have no player prefix. None: each of a
                player's actions is set separately.
            group_map: group to agents, or a ``MarlGroupMapType``. None: all players in
                one group.
            max_steps: frames after which an episode is truncated.
            categorical_actions: False for one-hot Discrete actions.
            rebuild: build a new Lab2d for every episode. Needed for levels that cannot
                start twice (many of those made with MeltingPot's Lua modules) or that
                keep state across episodes (pushbox, in ``WORLD.STEPS``).

        Raises:
            ImportError: if dmlab2d is not installed.
            ValueError: for an unknown setting, observation, action or agent, and for a
                group whose players differ in observations or actions.
        """
        options = options_of(LevelOptions, locals())
        require("level", level, str, Option(""))
        require("rebuild", rebuild, bool, Option(""))
        self._world = Lab2dWorld(_flatten(level, settings or {}), rebuild=rebuild)
        with closed_on_error(self._world):
            self._world.build()
            self._level = LevelSpec.read(self._world)
            groups = group_players(group_map, len(self._level.prefixes), ())
            self._actions = {
                group: self._action_writer(group, agents, actions, options)
                for group, agents in groups.items()
            }
            self._description = self._describe(level, groups, options)
        self._max_steps = max_steps
        self.reset_seconds = 0.0

    @property
    @override
    def description(self) -> EnvDescription:
        return self._description

    @override
    def bind(self, row: Row) -> None:
        self._row = row
        self._flags = Flags(row, self._description)
        self._observations = [(name, row[name,]) for name in self._description.root]
        self._rewards: list[tuple[str, NDArray[Any]]] = []
        self._shared_rewards: list[NDArray[Any]] = []
        for player_row in player_rows(self._description.group_map):
            prefix = self._level.prefixes[player_row.player]
            for name in observed_names(self._description.groups[player_row.group]):
                target = row[player_row.group, "observation", name][player_row.index]
                self._observations.append((prefix + name, target))
            target = row[player_row.group, "reward"][player_row.index]
            if self._level.has_rewards:
                self._rewards.append((prefix + REWARD, target))
            else:
                self._shared_rewards.append(target)

    @override
    def reset_row(self, seed: int) -> None:
        began = time.perf_counter()
        built = self._world.lab
        self._world.start(seed)
        if self._world.lab is not built:
            for actions in self._actions.values():
                actions.attach(self._world)
        self._flags.clear()
        self._observe()
        self.reset_seconds += time.perf_counter() - began

    @override
    def step_row(self) -> None:
        for actions in self._actions.values():
            actions.write(self._row)
        world = self._world
        world.advance()
        self._observe()
        for name, target in self._rewards:
            target[...] = world.lab.observation(name)
        for target in self._shared_rewards:
            target[...] = world.reward
        if not world.running:
            truncated = world.truncated
            self._flags.end_all(terminated=not truncated, truncated=truncated)
        elif world.frames == self._max_steps:
            world.running = False  # Advancing it needs a new start.
            self._flags.truncate()

    def events(self) -> Sequence[tuple[str, Sequence[Any]]]:
        """Return name and arguments of each event of the last reset or step."""
        return self._world.events()

    def list_property(self, key: str = "") -> Sequence[tuple[str, Any]]:
        """Return name and attributes of each of the level's properties under ``key``.

        Raises:
            KeyError: if the property does not exist or has no properties under it.
        """
        properties: Sequence[tuple[str, Any]] = self._world.lab.list_property(key)
        return properties

    def read_property(self, key: str) -> str:
        """Return a property of the level, such as ``"settings.topology"``.

        Raises:
            KeyError: if the property does not exist.
        """
        return str(self._world.lab.read_property(key))

    def write_property(self, key: str, value: str) -> None:
        """Set a property of the level.

        Raises:
            KeyError: if the property does not exist or cannot be written.
        """
        self._world.lab.write_property(key, value)

    @override
    def render(self) -> NDArray[np.uint8] | None:
        """Return ``WORLD.RGB``; None if the level has none or was never reset."""
        return self._world.image(_IMAGE) if _IMAGE in self._level.fields else None

    @override
    def close(self) -> None:
        self._closed = True
        self._world.close()

    def _observe(self) -> None:
        observation = self._world.lab.observation
        for name, target in self._observations:
            target[...] = observation(name)

    def _action_writer(
        self,
        group: str,
        agents: tuple[str, ...],
        table: Table | None,
        options: LevelOptions,
    ) -> GroupActions:
        prefixes = tuple(self._level.prefixes[player_of(agent)] for agent in agents)
        one_hot = not options.categorical_actions
        players = PlayerGroup(group, agents, prefixes, one_hot=one_hot)
        writer: GroupActions = (
            NativeGroupActions(self._world, players)
            if table is None
            else TableGroupActions(table, players)
        )
        writer.attach(self._world)
        return writer

    def _describe(
        self, name: str, groups: Mapping[str, tuple[str, ...]], options: LevelOptions
    ) -> EnvDescription:
        """Return the description.

        Raises:
            ValueError: for an unknown observation, or if players of a group lack one.
        """
        level, requested = self._level, options.observations
        if requested is not None:
            level.check_requested(requested)
        of_world = level.of_world(requested)
        described = {}
        for group, agents in groups.items():
            fields = level.of_group([player_of(agent) for agent in agents], requested)
            missing = [
                n for n in requested or () if n not in fields and n not in of_world
            ]
            if missing or not fields:
                raise ValueError(
                    f"Group {group!r} must have at least one observation, with the "
                    f"same shape for all of its agents {list(agents)}. Found "
                    f"{list(fields)}; missing: {missing}. Put agents with different "
                    "observations into different groups (group_map)."
                )
            described[group] = GroupDescription(
                agents=agents,
                observation=spaces.Dict({n: space_of(f) for n, f in fields.items()}),
                action=self._actions[group].space,
                categorical_actions=options.categorical_actions,
                mask=False,
            )
        limits = [options.max_steps, self._world.time_limit]
        return EnvDescription(
            name=name,
            groups=described,
            root={key: space_of(field) for key, field in of_world.items()},
            repeats=not self._world.env_seed,
            time_limit=min((n for n in limits if n is not None), default=None),
        )


def _flatten(level: str, settings: Mapping[str, Any]) -> dict[str, str]:
    import_dmlab2d()
    from dmlab2d import settings_helper

    flat = settings_helper.flatten_args(dict(settings) | {"levelName": level})
    return {key: str(value) for key, value in flat.items()}
