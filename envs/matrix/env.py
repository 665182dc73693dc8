"""``MatrixGameEnv``: two agents that play a matrix game again and again.

Sources:
    Claus and Boutilier, "The Dynamics of Reinforcement Learning in Cooperative
    Multiagent Systems", AAAI 1998: the games. Papoudakis et al., "Benchmarking
    Multi-Agent Deep Reinforcement Learning Algorithms in Cooperative Tasks", arXiv
    2006.07869, with github.com/uoe-agents/matrix-games: 25 rounds, and observations
    that are always zero.
"""

from typing import Any, Final, final

import numpy as np
from gymnasium import spaces

from marl_collect.envs.agent_lists import AgentLists
from marl_collect.envs.common import Array
from marl_collect.envs.matrix.provider import FAMILY, PENALTIES
from marl_collect.envs.pettingzoo.description import split_options
from marl_collect.envs.pettingzoo.env import PettingZooBase

PAYOFFS: Final = {
    "climbing": ((11, -30, 0), (-30, 7, 0), (0, 6, 5)),
    **{name: ((k, 0, 10), (0, 2, 0), (10, 0, k)) for name, k in PENALTIES.items()},
}
"""The reward of both agents by the actions of the first and the second."""


@final
class MatrixGameEnv(PettingZooBase):
    """A repeated matrix game: ``"climbing"``, ``"penalty-0"`` to ``"penalty-100"``.

    Both agents get the same reward, which depends on their actions in this round alone.
    Observations are zeros, float32 ``[2]``, so there is nothing to remember.

    Example:
        >>> from functools import partial
        >>> factory = partial(MatrixGameEnv, "climbing")
    """

    def __init__(self, task: str, *, rounds: int = 25, **kwargs: Any) -> None:
        """Build the environment.

        Args:
            task: name of the game.
            rounds: of an episode, which is then truncated.
            kwargs: keywords of ``PettingZooWrapper``.

        Raises:
            TypeError: for an unknown keyword.
            UnknownTaskError: if there is no such game.
            ValueError: if a value does not fit.
        """
        FAMILY.require(task)
        options, others = split_options(kwargs)
        if others:
            raise TypeError(
                f"{task} has no argument {', '.join(others)}, only rounds and the "
                "keywords of PettingZooWrapper."
            )
        if rounds < 1:
            raise ValueError(f"rounds must be at least 1, but is {rounds}.")
        game = AgentLists(_Rounds(np.array(PAYOFFS[task], np.float32)))
        super().__init__(game, task, options.with_limit(rounds), fast=False)


@final
class _Rounds:
    """The game with Gymnasium's methods; it does not end by itself."""

    def __init__(self, payoffs: Array) -> None:
        self._payoffs = payoffs.tolist()
        self.action_space = spaces.Tuple([spaces.Discrete(n) for n in payoffs.shape])
        seen = spaces.Box(0.0, 1.0, (payoffs.ndim,), np.float32)
        self.observation_space = spaces.Tuple([seen] * payoffs.ndim)
        self._seen = [np.zeros(payoffs.ndim, np.float32)] * payoffs.ndim

    def reset(self, seed: int | None = None) -> tuple[list[Array], dict[str, Any]]:
        del seed
        return self._seen, {}

    def step(self, actions: Any) -> tuple[list[Array], float, bool, bool, Any]:
        first, second = actions
        return self._seen, self._payoffs[first][second], False, False, {}

    def close(self) -> None:
        pass
