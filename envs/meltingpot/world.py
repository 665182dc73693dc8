"""Worlds: a substrate stepped through its Lab2d, and objects that MeltingPot built."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Field
from marl_collect.envs.common import closed_on_error
from marl_collect.envs.lab2d.actions import TableActions
from marl_collect.envs.lab2d.world import Lab2dWorld
from marl_collect.envs.meltingpot.imports import import_meltingpot
from marl_collect.envs.meltingpot.settings import (
    COLLECTIVE_REWARD,
    INSTALL_BOTS,
    WORLD_IMAGE,
    SubstrateSettings,
    WorldSpec,
    lacks_bots,
    scenarios,
    substrates,
    unknown_name,
)

_LIMIT = "settings.maxEpisodeLengthFrames"


Players = Sequence[tuple[int, str, NDArray[Any]]]
"""Player (counted from 0), name and memory of each observation."""


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
        """Read the shapes that depend on an unusual number of players, by building.

        Raises:
            ValueError: if the level does not accept all actions of the substrate.
        """
        if self.spec.n_players == self._settings.usual_players:
            return
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

    def bind(self, players: Players, image: NDArray[Any] | None) -> None:
        """From now on, write observations to this memory."""
        self._observations = [
            (self._source(player, name), target)
            for player, name, target in players
            if name != COLLECTIVE_REWARD
        ]
        if image is not None:
            self._observations.append((WORLD_IMAGE, image))
        # MeltingPot computes this one in Python: the sum of all players' rewards.
        self._sums = [t for _, name, t in players if name == COLLECTIVE_REWARD]

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


@final
class BuiltWorld:
    """Steps any object that has the interface of MeltingPot's substrates.

    The players are the focal players of a scenario. Its bots are part of the world.

    Attributes:
        running: whether an episode is running.
        spec: the players, observations and actions.
        rewards: rewards of the last step, float64 ``[n_players]``.
    """

    running = False

    def __init__(self, env: Any, name: str, roles: Sequence[str] = ()) -> None:
        """Own ``env``; ``close`` closes it.

        Raises:
            TypeError: if ``env`` lacks a method of substrates.
        """
        needed = ("reset", "step", "observation_spec", "action_spec", "close")
        missing = [method for method in needed if not hasattr(env, method)]
        if isinstance(env, (str, type)) or missing:
            raise TypeError(
                "Expected a substrate or scenario that MeltingPot built, but found "
                f"{env!r} of type {type(env).__name__}, which lacks the methods "
                f"{missing or needed}. To build one by name, use MeltingpotEnv(name)."
            )
        self._env: Any = env
        self.spec = _spec(env, name, tuple(roles))
        self.rewards = np.zeros(self.spec.n_players, np.float64)
        self._timestep: Any = None
        # Timestep with the image of the world, which a scenario's own timesteps lack.
        self._whole: Any = None
        self._frames = 0
        observables = getattr(env, "observables", lambda: None)()
        substrate = getattr(observables, "substrate", observables)
        if substrate is not None:
            substrate.timestep.subscribe(self._keep_whole)

    @property
    def truncated(self) -> bool:
        """Whether the last episode ended at the substrate's frame limit."""
        return self._frames == self.spec.time_limit

    def bind(self, players: Players, image: NDArray[Any] | None) -> None:
        """From now on, write observations to this memory."""
        self._players, self._image = players, image

    def start(self, seed: int) -> None:
        """Begin an episode. ``seed`` determines the bots and their actions."""
        self.running = False
        with _seeded(seed):
            self._timestep = self._env.reset()
        self._frames = 0
        self.running = True

    def step(self, actions: NDArray[np.int64]) -> None:
        """Step with ``actions``, ``[n_players]``, and update ``rewards``."""
        if not self.running:
            raise RuntimeError("No episode is running: call reset() first.")
        self.running = False  # stays False if the step raises
        self._timestep = self._env.step(actions.tolist())
        self._frames += 1
        self.rewards[:] = self._timestep.reward
        self.running = not self._timestep.last()

    def observe(self) -> None:
        """Write the observations. May be called any number of times."""
        observations = self._timestep.observation
        for player, name, target in self._players:
            target[...] = observations[player][name]
        if self._image is not None:
            self._image[...] = observations[0][WORLD_IMAGE]

    def render(self) -> NDArray[np.uint8] | None:
        """Return an image of the whole world, or None if there is none."""
        timestep = self._timestep if self._whole is None else self._whole
        if timestep is None:
            return None
        image = timestep.observation[0].get(WORLD_IMAGE)
        return None if image is None else np.array(image)

    def events(self) -> Sequence[tuple[str, Any]]:
        """Return the events of the last start or step; scenarios have none."""
        events: Sequence[tuple[str, Any]] = (
            () if self._env is None else self._env.events()
        )
        return events

    def close(self) -> None:
        """Release all resources."""
        self.running = False
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _keep_whole(self, timestep: Any) -> None:
        self._whole = timestep


def build_scenario(name: str) -> BuiltWorld:
    """Build a scenario by name. Its bots need TensorFlow and MeltingPot's archive.

    Raises:
        ValueError: if no scenario has this name.
        FileNotFoundError: if the archive of bots is not installed.
    """
    known = scenarios()
    if name not in known:
        raise unknown_name(name, [*known, *substrates()])
    if lacks_bots(name):
        raise FileNotFoundError(
            f"The bots of scenario {name} are not installed: {INSTALL_BOTS} downloads "
            "MeltingPot's archive of bots."
        )
    scenario = import_meltingpot().scenario
    config = scenario.get_config(name)
    focal = zip(config.roles, config.is_focal, strict=True)
    roles = [role for role, is_focal in focal if is_focal]
    env = scenario.build(name)
    with closed_on_error(env):
        world = BuiltWorld(env, name, roles)
    return world  # noqa: RET504 - the block may raise


def _spec(env: Any, name: str, roles: tuple[str, ...]) -> WorldSpec:
    players = [dict(player) for player in env.observation_spec()]
    first = players[0]
    fields = {
        key: Field(tuple(spec.shape), np.dtype(spec.dtype))
        for key, spec in first.items()
        if all(_same(spec, player.get(key)) for player in players)
    }
    image = fields.pop(WORLD_IMAGE, None)
    limit = None
    # Only the level knows its limit, and a custom object may have no level.
    with contextlib.suppress(AttributeError, KeyError):
        limit = int(float(env.read_property(_LIMIT)))
    return WorldSpec(
        name=name,
        roles=roles,
        n_players=len(players),
        n_actions=int(env.action_spec()[0].num_values),
        observations=dict(sorted(fields.items())),
        world_image=image,
        time_limit=limit,
    )


def _same(spec: Any, other: Any) -> bool:
    return other is not None and (spec.shape, spec.dtype) == (other.shape, other.dtype)


@contextlib.contextmanager
def _seeded(seed: int) -> Any:
    """Seed Python's ``random``, which MeltingPot samples bots with, then restore it."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
