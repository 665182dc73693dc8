"""``OpenSpielEnv``: games of OpenSpiel, through Shimmy."""

from collections.abc import Mapping
from typing import Any, final

import numpy as np
from gymnasium import spaces
from typing_extensions import override

from marl_collect.envs.pettingzoo.description import split_options
from marl_collect.envs.pettingzoo.env import PettingZooBase
from marl_collect.errors import imports_of
from marl_collect.options import Option, require

with imports_of("openspiel", "OpenSpielEnv"):
    from shimmy.openspiel_compatibility import OpenSpielCompatibilityV0


@final
class OpenSpielEnv(PettingZooBase):
    """A game of OpenSpiel, such as ``"kuhn_poker"``, whose players act in turn.

    Observations are the game's observation tensors, float32, or its information state
    tensors if it has no others. ``(group, "action_mask")`` has the legal actions. A
    chance event is drawn with the seed of the episode, within the frame before it. In a
    simultaneous game each player's action is one frame, and no player sees the actions
    of the others before all have acted.

    Example:
        >>> from functools import partial
        >>> factory = partial(OpenSpielEnv, "goofspiel", num_cards=4, players=3)
    """

    def __init__(self, game: str, **kwargs: Any) -> None:
        """Build the environment.

        Args:
            game: short name of the game.
            kwargs: parameters of the game, such as ``players=3``, and keywords of
                ``PettingZooWrapper``.

        Raises:
            pyspiel.SpielError: if a parameter does not fit.
        """
        options, parameters = split_options(kwargs)
        require("game", game, str, Option(""))
        super().__init__(_Game(game, parameters), game, options, fast=False)


@final
class _Game(OpenSpielCompatibilityV0):
    """Shimmy's adapter, with repairs for Shimmy 2.0.1."""

    def __init__(self, game: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(game_name=game, config=dict(parameters))
        for agent, space in self.observation_spaces.items():
            # The tensors are float32 in the game.
            self.observation_spaces[agent] = spaces.Box(
                -np.inf, np.inf, space.shape, np.float32
            )
        self._built = True

    @property
    def game_length(self) -> int:
        """0: with its count of nodes, Shimmy truncates games that are not over.

        It counts chance events, which ``max_game_length`` does not. Every game ends.
        """
        return 0

    @game_length.setter
    def game_length(self, _: int) -> None:
        pass

    @override
    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self._returns = [0.0] * len(self.possible_agents)
        super().reset(seed, options)

    @override
    def _update_rewards(self) -> None:
        """Set the rewards of the last action.

        ``rewards()`` of a state repeats the last ones until the next transition, while
        the players of a simultaneous game choose.
        """
        returns = self.game_state.returns()
        self.rewards = {
            agent: after - before
            for agent, after, before in zip(
                self.agents, returns, self._returns, strict=True
            )
        }
        self._returns = returns

    @override
    def _update_observation_spaces(self) -> None:
        if not hasattr(self, "_built"):  # The spaces never change.
            super()._update_observation_spaces()

    @override
    def _update_action_spaces(self) -> None:
        if not hasattr(self, "_built"):
            super()._update_action_spaces()
