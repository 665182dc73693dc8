"""Lab2d itself: a level that dmlab2d ships, or one of the user's own."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.keywords import options_of
from marl_collect.envs.lab2d.actions import Table
from marl_collect.envs.lab2d.description import Lab2dOptions, act, describe
from marl_collect.envs.lab2d.level import REWARD, LevelSpec
from marl_collect.envs.lab2d.players import player_rows
from marl_collect.envs.lab2d.world import Lab2dWorld, import_dmlab2d
from marl_collect.errors import ClosedError

_IMAGE = "WORLD.RGB"


@final
class Lab2dEnv(MultiAgentEnv):
    """A level of Lab2d, whose players are the agents ``player_0``, ``player_1``, ...

    =========================================  =======================================
    key                                        what stands there
    =========================================  =======================================
    ``(g, "observation", NAME)``               Lab2d's ``"<i>.NAME"``, ``[n, *shape]``
                                               in its own dtype; a scalar is ``[n, 1]``
    ``NAME``                                   what belongs to no player, such as
                                               ``"WORLD.RGB"``, if it is asked for
    ``(g, "reward")``                          ``"<i>.REWARD"``, or the level's one
                                               reward for every agent
    ``(g, "action")``                          as below
    =========================================  =======================================

    A player's actions, sorted by name, are a ``MultiDiscrete`` space that counts from
    0 whatever Lab2d's least value is (``Discrete`` if there is one action only), or a
    ``Box`` if they are continuous; a level with both has a Dict of ``"discrete"`` and
    ``"continuous"``. A table of ``actions`` makes them one ``Discrete``. Text actions
    stay empty.

    A level without players' names has one agent, which observes and does everything.

    The same seed and actions give the same episode, unless the level remembers the last
    one (see ``rebuild``) or has the setting ``env_seed``, as all those made with
    MeltingPot's Lua modules: these do not repeat, and ``description.repeats`` says so.

    An end at the level's own frame limit (its setting ``episodeLengthFrames`` or
    ``maxEpisodeLengthFrames``) and at ``max_steps`` is ``truncated``, any other
    ``terminated``.

    Example:
        >>> env = Lab2dEnv("commons_harvest", {"numPlayers": 2}, observations=["RGB"])
        >>> env.group_map
        {'agents': ['player_0', 'player_1']}
        >>> env.close()

    Attributes:
        reset_seconds: seconds that all resets together took.
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
            level: its name, Lab2d's ``levelName``.
            settings: of the level, nested mappings and lists allowed; with
                ``levelDirectory`` if it is not one that dmlab2d ships.
            observations: names without the player's prefix (``"RGB"``), and whole
                names of what belongs to no player (``"WORLD.RGB"``): nothing else is
                asked of Lab2d. None: every player's numbers.
            actions: a table; action ``i`` sets what ``actions[i]`` says, names without
                the player's prefix. None: each of a player's actions by itself.
            group_map: None or all players in one group, or any other map.
            max_steps: frames after which an episode is truncated.
            categorical_actions: False for one-hot Discrete actions.
            rebuild: build Lab2d anew for every episode, for levels that cannot start
                twice (as many made with MeltingPot's Lua modules) or that remember
                the last episode when they do (as pushbox does in ``WORLD.STEPS``).

        Raises:
            ImportError: if dmlab2d is not installed.
            ValueError: for a setting, observation, action or agent that is not there,
                and for a group of players who differ.
        """
        options = options_of(Lab2dOptions, locals())
        self._world = Lab2dWorld(_flatten(level, settings or {}), rebuild=rebuild)
        self._world.build()
        self._level = LevelSpec.read(self._world)
        self._actions = act(self._world, self._level, options)
        self._description = describe(
            level, self._world, self._level, options, self._actions
        )
        self._max_steps = max_steps
        self.reset_seconds = 0.0
        self._closed = False

    @property
    def description(self) -> EnvDescription:
        """Groups, spaces and promises."""
        return self._description

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closed

    def bind(self, row: Row) -> None:
        """Read actions from and write everything else to ``row`` from now on."""
        self._row = row
        self._flags = Flags(row, self._description)
        self._pulls = [(name, row[name,]) for name in self._description.root]
        self._rewards: list[tuple[str, NDArray[Any]]] = []
        self._shared_rewards: list[NDArray[Any]] = []
        for player_row in player_rows(self._description.group_map):
            prefix = self._level.prefixes[player_row.player]
            for name in _observed(self._description.groups[player_row.group]):
                target = row[player_row.group, "observation", name][player_row.index]
                self._pulls.append((prefix + name, target))
            target = row[player_row.group, "reward"][player_row.index]
            if self._level.has_rewards:
                self._rewards.append((prefix + REWARD, target))
            else:
                self._shared_rewards.append(target)

    def reset_row(self, seed: int) -> None:
        """Begin the episode that ``seed`` and the actions determine."""
        if self._closed:
            raise ClosedError("This Lab2dEnv is closed: build another.")
        began = time.perf_counter()
        built = self._world.lab
        self._world.start(seed)
        if self._world.lab is not built:
            for actions in self._actions.values():
                actions.attach(self._world)
        self._flags.clear()
        self._observe()
        self.reset_seconds += time.perf_counter() - began

    def step_row(self) -> None:
        """Step with the row's actions."""
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
            world.stop()
            self._flags.truncate()

    def events(self) -> Sequence[tuple[str, Sequence[Any]]]:
        """Return the events of the last reset or step, names and what came along."""
        return self._world.events()

    def list_property(self, key: str = "") -> Sequence[tuple[str, Any]]:
        """Return names and attributes of the level's properties under ``key``.

        Raises:
            KeyError: if there is no such property, or nothing is under it.
        """
        properties: Sequence[tuple[str, Any]] = self._world.lab.list_property(key)
        return properties

    def read_property(self, key: str) -> str:
        """Return a property of the level, such as ``"settings.topology"``.

        Raises:
            KeyError: if there is no such property.
        """
        return str(self._world.lab.read_property(key))

    def write_property(self, key: str, value: str) -> None:
        """Set a property of the level.

        Raises:
            KeyError: if there is no such property, or it cannot be written.
        """
        self._world.lab.write_property(key, value)

    def render(self) -> NDArray[np.uint8] | None:
        """Return ``WORLD.RGB``, or None if the level has none or was not reset."""
        return self._world.image(_IMAGE) if _IMAGE in self._level.fields else None

    def close(self) -> None:
        """Give Lab2d back."""
        self._closed = True
        self._world.close()

    def _observe(self) -> None:
        observation = self._world.lab.observation
        for name, target in self._pulls:
            target[...] = observation(name)


def _observed(group: GroupDescription) -> list[str]:
    assert isinstance(group.observation, spaces.Dict)
    return list(group.observation.spaces)


def _flatten(level: str, settings: Mapping[str, Any]) -> dict[str, str]:
    import_dmlab2d()
    from dmlab2d import settings_helper

    flat = settings_helper.flatten_args(dict(settings) | {"levelName": level})
    return {key: str(value) for key, value in flat.items()}
