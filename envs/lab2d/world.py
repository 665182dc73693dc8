"""A Lab2d instance: building, starting and advancing it safely.

Lab2d's checks are in C++, and a failed check ends the process. This module therefore
enforces their rules: observe only after a start, advance only while an episode runs,
and rebuild before each episode if the level cannot start twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Field
from marl_collect.errors import ClosedError, imports_of

_LIMITS = ("settings.maxEpisodeLengthFrames", "settings.episodeLengthFrames")
"""Settings with the frame limit, in MeltingPot's levels and in dmlab2d's."""

_ENV_SEED = "settings.env_seed"


def import_dmlab2d() -> Any:
    """Return the module ``dmlab2d``.

    Raises:
        MissingPackageError: if it is missing; names the extra to install.
    """
    with imports_of("dmlab2d", "Lab2dEnv"):
        import dmlab2d
    return dmlab2d


@final
class Lab2dWorld:
    """Owns one Lab2d instance.

    Attributes:
        running: whether an episode is running. Set it to False to end one.
        truncated: whether the last episode ended at the level's own frame limit.
        frames: number of frames of this episode so far.
        reward: the level's own reward of the last frame, for example the sum over
            players; 0 if the level has none.
        discrete: discrete actions of the next ``advance``, int32.
        continuous: continuous actions of the next ``advance``, float64.
        discrete_index: name of a discrete action to its index in ``discrete``. The
            order differs between builds of the same level.
        continuous_index: the same for ``continuous``.
        time_limit: the level's own frame limit, if any. Set by ``build``.
        env_seed: whether the level has the setting ``env_seed``. Set by ``build``.
    """

    discrete: NDArray[np.int32]
    continuous: NDArray[np.float64]
    discrete_index: dict[str, int]
    continuous_index: dict[str, int]

    def __init__(
        self, settings: Mapping[str, str], *, rebuild: bool, env_seed: bool = False
    ) -> None:
        """Store the settings. Lab2d is built on first use.

        Args:
            settings: Lab2d's flat settings, including ``levelName``.
            rebuild: whether to build a new Lab2d for each episode.
            env_seed: whether the level is known to have the setting ``env_seed``. If
                False, ``build`` finds out.
        """
        self._dmlab2d = import_dmlab2d()
        self._settings = dict(settings)
        self._rebuild = rebuild
        self.env_seed = env_seed
        self._lab: Any = None
        self._closed = False
        self.time_limit: int | None = None
        self.running = False
        self.truncated = False
        self.frames = 0
        self.reward = 0.0

    @property
    def lab(self) -> Any:
        """The Lab2d instance; built on first use.

        Raises:
            ClosedError: after ``close``.
        """
        if self._closed:
            raise ClosedError("This Lab2d is closed: build a new environment.")
        if self._lab is None:
            self.build()
        return self._lab

    def build(self, seed: int = 0) -> None:
        """Build a new Lab2d and drop the old one.

        Args:
            seed: seed for the level's setup, if the level has the setting ``env_seed``
                and the settings have none.
        """
        from dmlab2d import runfiles_helper

        self.running = False
        self._lab = None  # first, so that two never exist at the same time
        settings = self._settings
        if self.env_seed:
            # MeltingPot requires a seed other than zero.
            settings = {"env_seed": str(seed + 1)} | settings
        lab = self._dmlab2d.Lab2d(runfiles_helper.find(), settings)
        self._lab = lab
        discrete = lab.action_discrete_names()
        continuous = lab.action_continuous_names()
        self.discrete_index = {name: i for i, name in enumerate(discrete)}
        self.continuous_index = {name: i for i, name in enumerate(continuous)}
        self.discrete = np.zeros(len(discrete), np.int32)
        self.continuous = np.zeros(len(continuous), np.float64)
        limits = [self._number(key) for key in _LIMITS]
        self.time_limit = next((n for n in limits if n is not None), None)
        self.env_seed = self.env_seed or self._number(_ENV_SEED) is not None

    def start(self, seed: int) -> None:
        """Begin an episode.

        Args:
            seed: seed of the episode, in ``[0, 2**31)``.
        """
        if self._lab is None or self._rebuild:
            self.build(seed)
        self.running = False
        # A level may depend on the episode number, so the number is always the same.
        self.lab.start(0, seed)
        self.frames = 0
        self.reward = 0.0
        self.truncated = False
        self.running = True

    def advance(self) -> None:
        """Step once with the actions in ``discrete`` and ``continuous``.

        Raises:
            RuntimeError: if no episode is running.
        """
        if not self.running:
            raise RuntimeError(
                "No episode is running: call reset() first. Advancing Lab2d past the "
                "end of an episode may abort the process."
            )
        lab = self._lab
        self.running = False  # stays False if Lab2d raises
        if self.discrete_index:
            lab.act_discrete(self.discrete)
        if self.continuous_index:
            lab.act_continuous(self.continuous)
        status, reward = lab.advance()
        self.frames += 1
        self.reward = 0.0 if reward is None else reward
        if status == self._dmlab2d.RUNNING:
            self.running = True
        else:
            self.truncated = (
                self.frames == self.time_limit or status == self._dmlab2d.INTERRUPTED
            )

    def fields(self) -> dict[str, Field]:
        """Return the shape and dtype of each observation of the level.

        Strings have dtype object; a 0 in a shape means a variable size.
        """
        specs = {n: self.lab.observation_spec(n) for n in self.lab.observation_names()}
        return {
            name: Field(tuple(spec["shape"]), np.dtype(spec["dtype"]))
            for name, spec in specs.items()
        }

    def events(self) -> Sequence[tuple[str, Sequence[Any]]]:
        """Return name and arguments of each event of the last start or advance."""
        if self._lab is None:
            return []
        events: Sequence[tuple[str, Sequence[Any]]] = self._lab.events()
        return events

    def image(self, name: str) -> NDArray[np.uint8] | None:
        """Return an image observation, or None before the first start."""
        if self._lab is None or (self.frames == 0 and not self.running):
            return None
        image: NDArray[np.uint8] = self._lab.observation(name)
        return image

    def close(self) -> None:
        """Release Lab2d."""
        self.running = False
        self._closed = True
        self._lab = None

    def _number(self, key: str) -> int | None:
        try:
            return int(float(self._lab.read_property(key)))
        except (KeyError, ValueError):
            return None
