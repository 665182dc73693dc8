"""``MeltingpotEnv`` and ``MeltingpotWrapper``: substrates and scenarios."""

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
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.common import OneHot, closed_on_error, options_of
from marl_collect.envs.lab2d.actions import check_chosen
from marl_collect.envs.lab2d.players import (
    LevelOptions,
    PlayerRow,
    agent_name,
    group_players,
    observed_names,
    player_rows,
    space_of,
)
from marl_collect.envs.meltingpot.settings import (
    LogLevel,
    WorldSpec,
    read_substrate,
    substrates,
)
from marl_collect.envs.meltingpot.world import (
    BuiltWorld,
    DirectWorld,
    build_scenario,
)
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
        self._agents = [agent_name(player) for player in range(spec.n_players)]
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
        groups = self._description.groups
        self._flags = Flags(row, self._description)
        self._chosen = [
            (
                self._players[name],
                row[name, "action"],
                OneHot((name, "action"), group.agents, self._n_actions)
                if group.one_hot
                else None,
            )
            for name, group in groups.items()
        ]
        rewards = {name: row[name, "reward"] for name in groups}
        self._rewards = [
            (self._players[g], array[:, 0]) for g, array in rewards.items()
        ]
        self._sums: list[tuple[Any, Any, NDArray[np.float64]]] = [
            (array, row[g, "episode_reward"], np.zeros_like(array, np.float64))
            for g, array in rewards.items()
            if self._options.episode_reward
        ]
        players = [
            (
                player_row.player,
                name,
                row[player_row.group, "observation", name][player_row.index],
            )
            for player_row in self._player_rows
            for name in observed_names(groups[player_row.group])
        ]
        image = row[_IMAGE_KEY,] if self._options.world_rgb else None
        self._world.bind(players, image)
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


def _index(players: list[int]) -> slice | NDArray[np.intp]:
    """Return an index that selects these players; a slice if they are contiguous."""
    first = players[0]
    if players == list(range(first, first + len(players))):
        return slice(first, first + len(players))
    return np.array(players)


@final
class MeltingpotEnv(MeltingpotBase):
    """A substrate or scenario of MeltingPot; agents are ``player_0``, ``player_1``, ...

    ==================================  =============================================
    key                                 contents
    ==================================  =============================================
    ``(g, "observation", "RGB")``       uint8 ``[n, height, width, 3]``, each player's
                                        view
    ``(g, "observation", NAME)``        the substrate's other observations with their
                                        dtype; a scalar is ``[n, 1]``
    ``"RGB"``                           uint8, the whole world, if ``world_rgb``
    ``(g, "action")``, ``"reward"``     int64 ``[n]``; float32 ``[n, 1]``
    ==================================  =============================================

    Lab2d renders only the requested observations. Agents never die, so there is no
    ``mask``. An episode that ends at the substrate's own frame limit or at
    ``max_steps`` is ``truncated``; any other is ``terminated``.

    Every reset builds a new Lab2d, which takes many seconds in the large substrates.
    With ``truncate_without_reset``, a reset during an episode (after ``max_steps``, or
    where a collector cuts a trajectory) continues that episode: flags are cleared, and
    the first observation is the current one. A new episode begins only after the
    substrate has ended the last one.

    Seeds are passed to Lab2d, but MeltingPot's episodes are not reproducible.

    A substrate loads neither TensorFlow nor MeltingPot's bots; a scenario needs both.

    Example:
        >>> env = MeltingpotEnv("coins", observations=["RGB"])
        >>> env.group_map
        {'agents': ['player_0', 'player_1']}
        >>> env.close()

    Attributes:
        reset_seconds: total duration of all resets in seconds.
    """

    def __init__(  # noqa: PLR0913 - TorchRL's signature, and a few more
        self,
        substrate: str | Any,
        *,
        roles: Sequence[str] | None = None,
        max_steps: int | None = None,
        categorical_actions: bool = True,
        group_map: GroupMap
        | MarlGroupMapType
        | str
        | None = MarlGroupMapType.ALL_IN_ONE_GROUP,
        observations: Sequence[str] | None = None,
        world_rgb: bool = False,
        truncate_without_reset: bool = False,
        episode_reward: bool = False,
        log_level: LogLevel = "ERROR",
    ) -> None:
        """Read the configuration. The first reset builds the substrate.

        Args:
            substrate: name of a substrate (see ``available_envs``), name of a scenario,
                or a configuration from ``meltingpot.substrate.get_config``.
            roles: role of each player; the length is the number of players. None: the
                substrate's default roles. The roles of a scenario are fixed.
            max_steps: frames after which an episode is truncated.
            categorical_actions: False for one-hot actions.
            group_map: group to agents, or a ``MarlGroupMapType``; ``"role"`` for one
                group per role. None: all players in one group.
            observations: names, such as ``["RGB"]``. None: all observations of a
                player, as in TorchRL.
            world_rgb: whether to render the whole world, as ``"RGB"`` at the root.
                TorchRL always does.
            truncate_without_reset: whether a reset during an episode continues it.
            episode_reward: also write ``("next", g, "episode_reward")``, each agent's
                sum of rewards since the reset.
            log_level: messages of a substrate's Lua code that Lab2d prints: ``"INFO"``
                and ``"WARN"`` print tens of lines per reset in some substrates,
                ``"NEVER"`` none. A scenario prints what MeltingPot prints.

        Raises:
            ImportError: if MeltingPot is not installed.
            ValueError: for an unknown substrate, role, observation or agent.
            FileNotFoundError: if the bots of the scenario are not installed.
        """
        options = options_of(MeltingpotOptions, locals())
        scenario = isinstance(substrate, str) and substrate not in substrates()
        world: World = (
            build_scenario(substrate)
            if scenario
            else DirectWorld(*read_substrate(substrate, roles, log_level))
        )
        with closed_on_error(world):
            if isinstance(world, DirectWorld):
                world.measure()
            elif roles is not None:
                raise ValueError(
                    f"The roles of scenario {substrate} are fixed: leave roles out."
                )
            super().__init__(world, options)

    @staticmethod
    def available_envs() -> list[str]:
        """Return the names of all substrates."""
        return substrates()


@final
class MeltingpotWrapper(MeltingpotBase):
    """A substrate or scenario that was built with MeltingPot's own functions.

    It is stepped through its own interface, with its wrappers and bots, so its
    observables keep emitting. ``MeltingpotEnv`` is faster. Keys, flags and resets are
    the same as in ``MeltingpotEnv``.

    An environment is built in the process that steps it, so a collector's factory
    must build the substrate as well::

        lambda: MeltingpotWrapper(env=substrate.build("coins", roles=["default"] * 2))

    Attributes:
        reset_seconds: total duration of all resets in seconds.
    """

    def __init__(
        self,
        env: Any,
        *,
        max_steps: int | None = None,
        categorical_actions: bool = True,
        group_map: GroupMap
        | MarlGroupMapType
        | None = MarlGroupMapType.ALL_IN_ONE_GROUP,
        observations: Sequence[str] | None = None,
        world_rgb: bool = False,
        truncate_without_reset: bool = False,
        episode_reward: bool = False,
    ) -> None:
        """Own ``env``; ``close`` closes it.

        Args:
            env: the substrate or scenario.
            max_steps: see ``MeltingpotEnv``, also for the other arguments.
            categorical_actions: see ``MeltingpotEnv``.
            group_map: without ``"role"``, because ``env`` does not provide the roles.
            observations: see ``MeltingpotEnv``.
            world_rgb: substrates only; a scenario has no image of the whole world.
            truncate_without_reset: see ``MeltingpotEnv``.
            episode_reward: see ``MeltingpotEnv``.

        Raises:
            TypeError: if ``env`` lacks a method of substrates.
            ValueError: for an unknown observation or agent.
        """
        options = options_of(MeltingpotOptions, locals())
        super().__init__(BuiltWorld(env, type(env).__name__), options)
