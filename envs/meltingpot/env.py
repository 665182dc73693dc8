"""``MeltingpotEnv`` and ``MeltingpotWrapper``: substrates and scenarios."""

from collections.abc import Sequence
from typing import Any, final

from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.common import options_of
from marl_collect.envs.meltingpot.base import MeltingpotBase, MeltingpotOptions, World
from marl_collect.envs.meltingpot.built import BuiltWorld, build_scenario
from marl_collect.envs.meltingpot.settings import LogLevel, read_substrate, substrates
from marl_collect.envs.meltingpot.world import DirectWorld


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
        super().__init__(_world(substrate, roles, log_level), options)

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


def _world(substrate: Any, roles: Sequence[str] | None, log_level: LogLevel) -> World:
    if isinstance(substrate, str) and substrate not in substrates():
        world = build_scenario(substrate)
        if roles is not None:
            world.close()
            raise ValueError(
                f"The roles of scenario {substrate} are fixed: leave roles out."
            )
        return world
    spec, settings = read_substrate(substrate, roles, log_level)
    direct = DirectWorld(spec, settings)
    if spec.n_players != settings.usual_players:
        direct.measure()
    return direct
