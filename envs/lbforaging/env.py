"""``LbForagingEnv``: level-based foraging."""

from collections.abc import Mapping
from typing import Any, final

import gymnasium
import numpy as np
from gymnasium import spaces
from typing_extensions import override

from marl_collect.envs import registered
from marl_collect.envs.agent_lists import AgentLists
from marl_collect.envs.common import closed_on_error
from marl_collect.envs.lbforaging.provider import FAMILY, registered_task
from marl_collect.envs.pettingzoo.description import split_options
from marl_collect.envs.pettingzoo.env import PettingZooBase


@final
class LbForagingEnv(PettingZooBase):
    """A task of lbforaging, such as ``"Foraging-8x8-2p-3f-v3"``.

    Example:
        >>> from functools import partial
        >>> factory = partial(LbForagingEnv, "Foraging-2s-8x8-2p-2f-coop-v3")
    """

    def __init__(self, task: str, **kwargs: Any) -> None:
        """Build the environment.

        Args:
            task: name in Gymnasium's registry, or a paper's name, such as
                ``"15x15-4p-5f"``.
            kwargs: arguments of the task, such as ``max_num_food=5``, and keywords of
                ``PettingZooWrapper``.

        Raises:
            TypeError: for an unknown keyword.
            UnknownTaskError: if there is no such task.
            ValueError: if a value does not fit.
        """
        registered.require(FAMILY, task)
        options, arguments = split_options(kwargs)
        registered_name, variant = registered_task(task)
        env = registered.build("lbforaging", registered_name, {**variant, **arguments})
        with closed_on_error(env):
            limit: int = env._max_episode_steps  # noqa: SLF001 - it has no public name
            lists = AgentLists(_Foraging(env))
            super().__init__(lists, task, options.with_limit(limit), fast=False)


class _Foraging(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repairs lbforaging 2.0.0: its seed, and the flag of its time limit.

    It also omits the library's check of its observations, a tenth of its time.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._inner = env
        self.observation_space = env.observation_space
        unchecked = [
            _Unchecked(s.low, s.high, dtype=s.dtype) for s in env.observation_space
        ]
        env.observation_space = spaces.Tuple(unchecked)
        self._settings = {name: getattr(env, name) for name in _PER_EPISODE}
        players = sorted(env.max_player_level)
        food = env.max_food_level
        self._highest = {
            "player": players[-1],
            "food": sum(players[:3]) if food is None else max(food),
        }

    def set_task(self, task: Mapping[str, Any]) -> None:
        """Change arguments of the game for the next episode.

        Args:
            task: ``force_coop``, and lowest and highest levels of players and food: a
                number, or one for each. What is missing is as the game was built.

        Raises:
            ValueError: for another argument, or a level above those that agents of
                the game as it was built observe.
        """
        if unknown := sorted(task.keys() - self._settings):
            raise ValueError(
                f"A task of lbforaging has {list(self._settings)}, but found {unknown}."
            )
        game = self._inner
        for name, initial in self._settings.items():
            value = task.get(name, initial)
            if name != "force_coop" and value is not None:
                kind = name.split("_")[1]
                if np.max(value) > self._highest[kind]:
                    raise ValueError(
                        f"{name}={value} exceeds {self._highest[kind]}, the highest "
                        f"{kind} level of the game as it was built."
                    )
                value = np.broadcast_to(value, getattr(game, f"min_{kind}_level").shape)
            setattr(game, name, value)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode.

        A reset keeps players away from the cells where they were before, unless these
        are unknown, so an episode would depend on the last one.
        """
        for player in self._inner.players:
            player.position = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; an episode is terminated when no food is left."""
        inner = self._inner
        # The library finds plain integers faster than NumPy's.
        observations, rewards, over, _, infos = inner.step(list(map(int, action)))
        at_limit = inner.current_step >= inner._max_episode_steps  # noqa: SLF001
        return observations, rewards, over and not inner.field.any(), at_limit, infos


_PER_EPISODE = (
    "force_coop",
    "min_player_level",
    "max_player_level",
    "min_food_level",
    "max_food_level",
)


@final
class _Unchecked(spaces.Box):
    @override
    def contains(self, x: Any) -> bool:
        return True
