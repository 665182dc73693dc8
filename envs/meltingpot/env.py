"""MeltingPot: any substrate or scenario by name, or one that was built by hand."""

from collections.abc import Sequence
from typing import Any, final

from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.keywords import options_of
from marl_collect.envs.meltingpot.base import MeltingpotBase, MeltingpotOptions
from marl_collect.envs.meltingpot.built import BuiltWorld, build_scenario
from marl_collect.envs.meltingpot.settings import read_substrate, substrates
from marl_collect.envs.meltingpot.world import DirectWorld, MeltingpotWorld


@final
class MeltingpotEnv(MeltingpotBase):
    """A substrate or scenario of MeltingPot; agents are ``player_0``, ``player_1``, ...

    ==================================  =============================================
    key                                 what stands there
    ==================================  =============================================
    ``(g, "observation", "RGB")``       uint8 ``[n, height, width, 3]``, each player's
                                        view
    ``(g, "observation", NAME)``        the substrate's other observations in their own
                                        dtype; a scalar is ``[n, 1]``
    ``"RGB"``                           uint8, the whole world, with ``world_rgb``
    ``(g, "action")``, ``"reward"``     int64 ``[n]``; float32 ``[n, 1]``
    ==================================  =============================================

    Lab2d renders only what is asked for. Nobody dies, so there is no ``mask``. The
    substrate's own frame limit and ``max_steps`` are ``truncated``, any other end
    ``terminated``.

    A reset builds Lab2d anew, which takes many seconds in the large substrates. With
    ``truncate_without_reset`` a reset while an episode is under way (after
    ``max_steps``, or where a collector cuts a trajectory) goes on with that episode:
    flags are cleared and the first observation is the current one. Only an episode that
    the substrate ended is followed by a new one.

    A seed goes to Lab2d, but MeltingPot does not repeat an episode for it.

    A substrate loads neither TensorFlow nor MeltingPot's bots; a scenario needs both.

    Example:
        >>> env = MeltingpotEnv("coins", observations=["RGB"])
        >>> env.group_map
        {'agents': ['player_0', 'player_1']}
        >>> env.close()

    Attributes:
        reset_seconds: seconds that all resets together took.
    """

    def __init__(
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
    ) -> None:
        """Read the configuration; a substrate is built by the first reset.

        Args:
            substrate: name of one of ``available_envs``, name of a scenario, or a
                configuration from ``meltingpot.substrate.get_config``.
            roles: of each player, as many as there shall be players; None for the
                substrate's own. A scenario has fixed ones.
            max_steps: frames after which an episode is truncated.
            categorical_actions: False for one-hot actions.
            group_map: None or all players in one group, ``"role"`` for a group per
                role, or any other map.
            observations: names, such as ``["RGB"]``; None for all that a player has,
                which is TorchRL's set.
            world_rgb: whether the picture of the whole world is rendered, as
                ``"RGB"`` at the root. TorchRL always does.
            truncate_without_reset: whether a reset in the middle of an episode goes on
                with it.

        Raises:
            ImportError: if MeltingPot is not installed.
            ValueError: for a substrate, role, observation or agent that does not exist.
            FileNotFoundError: for a scenario whose bots are not installed.
        """
        options = options_of(MeltingpotOptions, locals())
        super().__init__(_world(substrate, roles), options)

    @staticmethod
    def available_envs() -> list[str]:
        """Return the names of all substrates."""
        return substrates()


@final
class MeltingpotWrapper(MeltingpotBase):
    """A substrate or scenario that was built through MeltingPot's own functions.

    It is stepped through its own interface, wrappers and bots included, so its
    observables keep emitting; ``MeltingpotEnv`` is faster. Keys, flags and resets
    are those described there.

    Like every environment it is built in the process that steps it, so the factory of
    a collector builds the substrate too::

        lambda: MeltingpotWrapper(env=substrate.build("coins", roles=["default"] * 2))

    Attributes:
        reset_seconds: seconds that all resets together took.
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
    ) -> None:
        """Own ``env``, which is closed with this.

        Args:
            env: the substrate or scenario.
            max_steps: as in ``MeltingpotEnv``, like all that follow.
            categorical_actions: see there.
            group_map: see there; built objects do not tell their players' roles.
            observations: see there.
            world_rgb: see there; a scenario shows no picture of the whole world.
            truncate_without_reset: see there.

        Raises:
            TypeError: if ``env`` lacks a substrate's methods.
            ValueError: for an observation or agent that does not exist.
        """
        options = options_of(MeltingpotOptions, locals())
        super().__init__(BuiltWorld(env, type(env).__name__), options)


def _world(substrate: Any, roles: Sequence[str] | None) -> MeltingpotWorld:
    if isinstance(substrate, str) and substrate not in substrates():
        world = build_scenario(substrate)
        if roles is not None:
            world.close()
            raise ValueError(
                f"The scenario {substrate} has fixed roles: leave roles out."
            )
        return world
    spec, settings = read_substrate(substrate, roles)
    direct = DirectWorld(spec, settings)
    if spec.n_players != settings.usual_players:
        direct.measure()
    return direct
