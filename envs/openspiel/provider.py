"""Task provider of OpenSpiel's games: an entry point of ``marl_collect.tasks``."""

from typing import Any, Final

from marl_collect.envs.family import Family


def _listed() -> list[str]:
    """List the games of several players that can be observed as arrays.

    Mean-field games have no single players. The chance events of games with sampled
    chance are not determined by a seed.
    """
    import pyspiel

    kinds = pyspiel.GameType
    return [
        game.short_name
        for game in pyspiel.registered_games()
        if game.default_loadable
        and game.max_num_players > 1
        and game.dynamics != kinds.Dynamics.MEAN_FIELD
        and game.chance_mode != kinds.ChanceMode.SAMPLED_STOCHASTIC
        and (game.provides_observation_tensor or game.provides_information_state_tensor)
    ]


_SAFE = (
    *("bidding_rule", "fen", "gameversion", "grid", "observation_type", "obstype"),
    *("payoff", "payoffs", "pile_sizes", "points_order", "returns_type"),
    *("scoring_type", "ship_sizes", "ship_values", "string_rep"),
)
"""Texts that games parse; without ``boards_file`` and ``instances_file``."""


def _defaults(game: str) -> dict[str, Any]:
    import pyspiel

    (game_type,) = (g for g in pyspiel.registered_games() if g.short_name == game)
    parameters: dict[str, Any] = game_type.parameter_specification
    return parameters


FAMILY: Final = Family(
    name="openspiel",
    extra="openspiel",
    modules=("pyspiel", "shimmy", "pettingzoo"),
    distributions=("open-spiel", "shimmy"),
    listed=_listed,
    known=lambda game: game in _listed(),
    env="marl_collect.envs.openspiel.env:OpenSpielEnv",
    defaults=_defaults,
    safe=_SAFE,
)
