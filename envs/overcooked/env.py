"""``OvercookedEnv``: two cooks in a kitchen of Overcooked-AI."""

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, final

import numpy as np
from gymnasium import spaces

from marl_collect.envs.agent_lists import AgentLists
from marl_collect.envs.overcooked.provider import FAMILY
from marl_collect.envs.pettingzoo.description import split_options
from marl_collect.envs.pettingzoo.env import PettingZooBase
from marl_collect.errors import imports_of

_PLAYERS = ("player_0", "player_1")


@final
class OvercookedEnv(PettingZooBase):
    """A layout of Overcooked-AI, such as ``"cramped_room"``.

    The agents ``player_0`` and ``player_1`` observe the whole kitchen, each from its
    side: the library's lossless encoding, float32 ``[width, height, 26]``. Both get the
    reward of a delivered soup.

    Example:
        >>> from functools import partial
        >>> factory = partial(OvercookedEnv, "cramped_room", shaping=1.0)
    """

    def __init__(
        self, layout: str, *, horizon: int = 400, shaping: float = 0.0, **kwargs: Any
    ) -> None:
        """Build the environment.

        Args:
            layout: name of the layout.
            horizon: frames after which an episode is truncated. The last 40 frames can
                be seen in the observations.
            shaping: factor of the library's shaped reward of each agent, for example
                for an onion in a pot. It is added to the reward. The info
                ``shaped_reward`` has it without the factor.
            kwargs: parameters of the layout, such as ``cook_time=10``, and keywords of
                ``PettingZooWrapper``.

        Raises:
            UnknownTaskError: if there is no such layout for two players, because
                Overcooked-AI encodes no other states.
            ValueError: if a keyword does not fit.
        """
        FAMILY.require(layout)
        options, parameters = split_options(kwargs)
        kitchen = _Kitchen(layout, parameters, horizon, shaping)
        lists = AgentLists(kitchen, _PLAYERS)
        super().__init__(lists, layout, options.with_limit(horizon), fast=False)


@final
class _Kitchen:
    """An ``OvercookedGridworld`` that uses lists of agents.

    The library's own environment needs an old NumPy, and computes motion plans which it
    does not use.
    """

    def __init__(
        self, layout: str, parameters: Mapping[str, Any], horizon: int, shaping: float
    ) -> None:
        library = import_overcooked()
        self._recipes = library.Recipe
        self._mdp = library.OvercookedGridworld.from_layout_name(layout, **parameters)
        self._choices = library.Action.INDEX_TO_ACTION
        self._horizon = horizon
        self._shaping = shaping
        shape = tuple(map(int, self._mdp.get_lossless_state_encoding_shape()))
        space = spaces.Box(0, np.inf, shape, np.float32)
        self.observation_space = [space] * len(_PLAYERS)
        self.action_space = [spaces.Discrete(len(self._choices))] * len(_PLAYERS)

    def reset(self, *, seed: int | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
        del seed  # An episode always begins in the same state.
        self._configure()
        self._state = self._mdp.get_standard_start_state()
        return self._observe(), {}

    def step(self, actions: Sequence[int]) -> tuple[Any, ...]:
        self._configure()
        chosen = [self._choices[action] for action in actions]
        self._state, infos = self._mdp.get_state_transition(self._state, chosen)
        sparse = sum(infos["sparse_reward_by_agent"])
        shaped = infos["shaped_reward_by_agent"]
        return (
            self._observe(),
            [sparse + self._shaping * extra for extra in shaped],
            False,
            self._state.timestep >= self._horizon,
            [{"shaped_reward": extra} for extra in shaped],
        )

    def close(self) -> None:
        """Nothing to release."""

    def _observe(self) -> Sequence[Any]:
        observations: Sequence[Any] = self._mdp.lossless_state_encoding(
            self._state, self._horizon
        )
        return observations

    def _configure(self) -> None:
        """Set the recipes of this layout: the library has one set for the process."""
        if self._recipes.configuration is not self._mdp.recipe_config:
            self._recipes.configure(self._mdp.recipe_config)


def import_overcooked() -> Any:
    """Import the gridworld; the library's package needs a function of ``gym`` for it.

    Unless ``gym`` is imported already, a module that does nothing takes its place for
    the time of the import: ``gym`` may be missing, and warns about NumPy 2.
    """
    name = "gym.envs.registration"
    missing = () if "gym" in sys.modules else ("gym", "gym.envs", name)
    for module in missing:
        sys.modules[module] = ModuleType(module)
    if missing:
        sys.modules[name].register = lambda **_: None  # type: ignore[attr-defined]
    try:
        with imports_of("overcooked", "OvercookedEnv"):
            from overcooked_ai_py.mdp import overcooked_mdp
    finally:
        for module in missing:
            del sys.modules[module]
    return overcooked_mdp
