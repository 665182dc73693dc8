"""What MeltingPot's environments drive; here, a substrate's Lab2d itself."""

import abc
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
    """Where a world's observations go.

    Attributes:
        players: player, counted from 0, name, and the memory for it.
        image: memory for the picture of the whole world, if it is wanted.
    """

    players: Sequence[tuple[int, str, NDArray[Any]]]
    image: NDArray[np.uint8] | None


class MeltingpotWorld(abc.ABC):
    """Players who act, and what they then see.

    Attributes:
        rewards: float64 ``[n_players]``, of the last step.
    """

    rewards: NDArray[np.float64]

    @property
    @abc.abstractmethod
    def spec(self) -> WorldSpec:
        """What players see and do."""

    @property
    @abc.abstractmethod
    def running(self) -> bool:
        """Whether an episode is under way."""

    @property
    @abc.abstractmethod
    def truncated(self) -> bool:
        """Whether the episode that ended did so at the substrate's frame limit."""

    @abc.abstractmethod
    def bind(self, targets: Targets) -> None:
        """Write observations there from now on."""

    @abc.abstractmethod
    def start(self, seed: int) -> None:
        """Begin an episode."""

    @abc.abstractmethod
    def step(self, actions: NDArray[np.int64]) -> None:
        """Act, ``[n_players]``, and take the rewards."""

    @abc.abstractmethod
    def observe(self) -> None:
        """Write the observations; may be called any number of times."""

    @abc.abstractmethod
    def render(self) -> NDArray[np.uint8] | None:
        """Return a picture of the whole world, if there is one."""

    @abc.abstractmethod
    def events(self) -> Sequence[tuple[str, Any]]:
        """Return what happened in the last step."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back."""


@final
class DirectWorld(MeltingpotWorld):
    """Steps a substrate's Lab2d and asks it only for what is wanted.

    MeltingPot itself goes through five wrappers, which ask for everything. Like its
    ``ResetWrapper`` this builds a new Lab2d for each episode: some substrates abort
    the process when they start twice.
    """

    def __init__(self, spec: WorldSpec, settings: SubstrateSettings) -> None:
        """Build nothing yet."""
        self._lab2d = Lab2dWorld(settings.lab2d, rebuild=True, env_seed=True)
        self._settings = settings
        prefixes = [f"{player + 1}." for player in range(spec.n_players)]
        self._actions = TableActions(settings.actions, prefixes)
        self._reward_names = [prefix + "REWARD" for prefix in prefixes]
        self.rewards = np.zeros(spec.n_players, np.float64)
        self._spec = spec
        self._pulls: list[tuple[str, NDArray[Any]]] = []
        self._sums: list[NDArray[Any]] = []
        self._checked = False

    def measure(self) -> None:
        """Build once, to learn what depends on how many players there are.

        Raises:
            ValueError: if the level then refuses some of the substrate's actions.
        """
        self._lab2d.build()
        self._actions.attach(self._lab2d)
        fields = self._lab2d.fields()
        found = {
            name: fields.get(self._source(0, name), field)
            for name, field in self._spec.observations.items()
        }
        self._spec = replace(self._spec, observations=found)

    @property
    def spec(self) -> WorldSpec:
        """What players see and do."""
        return self._spec

    @property
    def running(self) -> bool:
        """Whether an episode is under way."""
        return self._lab2d.running

    @property
    def truncated(self) -> bool:
        """Whether the episode that ended did so at the substrate's frame limit."""
        return self._lab2d.truncated

    def bind(self, targets: Targets) -> None:
        """Write observations there from now on."""
        self._pulls = [
            (self._source(player, name), target)
            for player, name, target in targets.players
            if name != COLLECTIVE_REWARD
        ]
        if targets.image is not None:
            self._pulls.append((WORLD_IMAGE, targets.image))
        # MeltingPot adds this one in Python: the sum of all players' rewards.
        self._sums = [t for _, name, t in targets.players if name == COLLECTIVE_REWARD]

    def start(self, seed: int) -> None:
        """Begin an episode in a new Lab2d.

        Raises:
            ValueError: if the level does not do as the configuration says.
        """
        self._lab2d.start(seed)
        self._actions.attach(self._lab2d)
        if not self._checked:
            self._check_shapes()
            self._checked = True
        self._take_rewards()

    def step(self, actions: NDArray[np.int64]) -> None:
        """Act, ``[n_players]``, and take the rewards."""
        self._actions.write(actions)
        self._lab2d.advance()
        self._take_rewards()

    def observe(self) -> None:
        """Write the observations."""
        observation = self._lab2d.lab.observation
        for name, target in self._pulls:
            target[...] = observation(name)
        if self._sums:
            total = self.rewards.sum()
            for target in self._sums:
                target[...] = total

    def render(self) -> NDArray[np.uint8] | None:
        """Return a picture of the whole world, drawn for this call."""
        return self._lab2d.image(WORLD_IMAGE)

    def events(self) -> Sequence[tuple[str, Any]]:
        """Return what happened in the last step."""
        return self._lab2d.events()

    def close(self) -> None:
        """Give Lab2d back."""
        self._lab2d.close()

    def _take_rewards(self) -> None:
        observation = self._lab2d.lab.observation
        for player, name in enumerate(self._reward_names):
            self.rewards[player] = observation(name)

    def _check_shapes(self) -> None:
        """Writing into memory of another shape might pass, and spread one number."""
        fields = self._lab2d.fields()
        for name, target in self._pulls:
            field = fields.get(name)
            if field is None or (field.shape or (1,)) != target.shape:
                raise ValueError(
                    f"{self._spec.name}: the configuration says that {name} has "
                    f"the shape {target.shape}, but in the level it has "
                    f"{'none' if field is None else field.shape}."
                )

    def _source(self, player: int, name: str) -> str:
        return name if name in self._settings.shared else f"{player + 1}.{name}"
