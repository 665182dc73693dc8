"""``DirectWorld``: a substrate that is stepped through its Lab2d."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.envs.lab2d.actions import TableActions
from marl_collect.envs.lab2d.world import Lab2dWorld
from marl_collect.envs.meltingpot.settings import (
    COLLECTIVE_REWARD,
    WORLD_IMAGE,
    SubstrateSettings,
    WorldSpec,
)


@dataclass(frozen=True)
class Targets:
    """The memory that a world writes observations to.

    Attributes:
        players: player (counted from 0), name and memory of each observation.
        image: memory for the image of the whole world, if requested.
    """

    players: Sequence[tuple[int, str, NDArray[Any]]]
    image: NDArray[np.uint8] | None


@final
class DirectWorld:
    """Steps a substrate's Lab2d directly and computes only requested observations.

    MeltingPot's own five wrappers compute all observations. Like its ``ResetWrapper``,
    this class builds a new Lab2d for each episode, because some substrates abort the
    process when they start twice.

    Attributes:
        spec: the players, observations and actions.
        rewards: rewards of the last step, float64 ``[n_players]``.
    """

    def __init__(self, spec: WorldSpec, settings: SubstrateSettings) -> None:
        """Store the settings. Lab2d is built by ``measure`` or ``start``."""
        self._lab2d = Lab2dWorld(settings.lab2d, rebuild=True, env_seed=True)
        self._settings = settings
        prefixes = [f"{player + 1}." for player in range(spec.n_players)]
        self._actions = TableActions(settings.actions, prefixes)
        self._reward_names = [prefix + "REWARD" for prefix in prefixes]
        self.rewards = np.zeros(spec.n_players, np.float64)
        self.spec = spec
        self._observations: list[tuple[str, NDArray[Any]]] = []
        self._sums: list[NDArray[Any]] = []
        self._checked = False

    def measure(self) -> None:
        """Build once and read the shapes that depend on the number of players.

        Raises:
            ValueError: if the level does not accept all actions of the substrate.
        """
        self._lab2d.build()
        self._actions.attach(self._lab2d)
        fields = self._lab2d.fields()
        measured = {
            name: fields.get(self._source(0, name), field)
            for name, field in self.spec.observations.items()
        }
        self.spec = replace(self.spec, observations=measured)

    @property
    def running(self) -> bool:
        """Whether an episode is running."""
        return self._lab2d.running

    @property
    def truncated(self) -> bool:
        """Whether the last episode ended at the substrate's frame limit."""
        return self._lab2d.truncated

    def bind(self, targets: Targets) -> None:
        """From now on, write observations to ``targets``."""
        self._observations = [
            (self._source(player, name), target)
            for player, name, target in targets.players
            if name != COLLECTIVE_REWARD
        ]
        if targets.image is not None:
            self._observations.append((WORLD_IMAGE, targets.image))
        # MeltingPot computes this one in Python: the sum of all players' rewards.
        self._sums = [t for _, name, t in targets.players if name == COLLECTIVE_REWARD]

    def start(self, seed: int) -> None:
        """Begin an episode in a new Lab2d.

        Raises:
            ValueError: if the level contradicts the substrate's configuration.
        """
        self._lab2d.start(seed)
        self._actions.attach(self._lab2d)
        if not self._checked:
            self._check_shapes()
            self._checked = True
        self._take_rewards()

    def step(self, actions: NDArray[np.int64]) -> None:
        """Step with ``actions``, ``[n_players]``, and update ``rewards``."""
        self._actions.write(actions)
        self._lab2d.advance()
        self._take_rewards()

    def observe(self) -> None:
        """Write the observations. May be called any number of times."""
        observation = self._lab2d.lab.observation
        for name, target in self._observations:
            target[...] = observation(name)
        if self._sums:
            total = self.rewards.sum()
            for target in self._sums:
                target[...] = total

    def render(self) -> NDArray[np.uint8] | None:
        """Return an image of the whole world, or None if there is none."""
        return self._lab2d.image(WORLD_IMAGE)

    def events(self) -> Sequence[tuple[str, Any]]:
        """Return the events of the last start or step; scenarios have none."""
        return self._lab2d.events()

    def close(self) -> None:
        """Release all resources."""
        self._lab2d.close()

    def _take_rewards(self) -> None:
        observation = self._lab2d.lab.observation
        for player, name in enumerate(self._reward_names):
            self.rewards[player] = observation(name)

    def _check_shapes(self) -> None:
        """Check shapes, because NumPy would broadcast a smaller array silently."""
        fields = self._lab2d.fields()
        for name, target in self._observations:
            field = fields.get(name)
            if field is None or (field.shape or (1,)) != target.shape:
                raise ValueError(
                    f"{self.spec.name}: the configuration gives {name} the shape "
                    f"{target.shape}, but the level has "
                    f"{'no such observation' if field is None else field.shape}."
                )

    def _source(self, player: int, name: str) -> str:
        return name if name in self._settings.shared else f"{player + 1}.{name}"
