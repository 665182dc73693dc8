"""Task provider of repeated matrix games: an entry point of ``marl_collect.tasks``."""

from typing import Final

from marl_collect.envs.family import Family

PENALTIES: Final = {f"penalty-{k}": -k for k in (0, 25, 50, 75, 100)}
"""The penalty of each penalty game."""
_GAMES = ("climbing", *PENALTIES)

FAMILY: Final = Family(
    name="matrix",
    extra="pettingzoo",
    modules=("pettingzoo",),
    distributions=(),
    listed=lambda: _GAMES,
    known=_GAMES.__contains__,
    env="marl_collect.envs.matrix.env:MatrixGameEnv",
)
