"""One running Lab2d: built, started, advanced, and never advanced past its end.

Lab2d checks in C++, and ends the process where a check fails, so the rules that keep
it alive are here: observe only what was started, advance only what runs, and build
anew before the next episode where a level cannot start twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Field
from marl_collect.errors import ClosedError

_LIMITS = ("settings.maxEpisodeLengthFrames", "settings.episodeLengthFrames")
"""Where MeltingPot's levels and those that dmlab2d ships keep their frame limit."""

_ENV_SEED = "settings.env_seed"


def import_dmlab2d() -> Any:
    """Return the module ``dmlab2d``.

    Raises:
        ImportError: naming the extra to install, if it is missing.
    """
    try:
        import dmlab2d
    except ImportError as error:
        raise ImportError(
            "Lab2d environments need the package dmlab2d, which cannot be imported "
            f"({error}). Install it with: pip install 'marl-collect[dmlab2d]'"
        ) from error
    return dmlab2d


@final
class Lab2dWorld:
    """Owns one Lab2d.

    Attributes:
        running: whether an episode is under way.
        truncated: after the end of an episode: whether it was the level's own frame
            limit that ended it.
        frames: how often this episode was advanced.
        reward: the level's own reward of the last frame, the sum over players or
            whatever else the level counts; 0 where it counts nothing.
        discrete: int32, what the next ``advance`` does, one entry per discrete action.
        continuous: float64, one entry per continuous action.
        discrete_index: name of a discrete action to its place in ``discrete``. The
            order differs between two builds of one level.
        continuous_index: the same for ``continuous``.
        time_limit: the level's own frame limit, if it has one; known once built.
        env_seed: whether the level has the setting ``env_seed``; known once built.
    """

    discrete: NDArray[np.int32]
    continuous: NDArray[np.float64]
    discrete_index: dict[str, int]
    continuous_index: dict[str, int]

    def __init__(
        self, settings: Mapping[str, str], *, rebuild: bool, env_seed: bool = False
    ) -> None:
        """Build nothing yet.

        Args:
            settings: flat, as Lab2d takes them; ``levelName`` among them.
            rebuild: build a new Lab2d for each episode, and give the old one back.
            env_seed: whether the level is known to have the setting ``env_seed``;
                otherwise it is asked once it is built.
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
        """The Lab2d; built if there is none.

        Raises:
            ClosedError: after ``close``.
        """
        if self._closed:
            raise ClosedError("This Lab2d is closed: build another environment.")
        if self._lab is None:
            self.build()
        return self._lab

    def build(self, seed: int = 0) -> None:
        """Replace the Lab2d, if there is one, by a new one.

        Args:
            seed: of the level's own set-up, where the level takes one.
        """
        from dmlab2d import runfiles_helper

        self.running = False
        self._lab = None  # two would need twice the memory for a moment
        settings = self._settings
        if self.env_seed:
            # MeltingPot asks for a seed different from zero.
            settings = settings | {"env_seed": str(seed + 1)}
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
            seed: of the episode, in ``[0, 2**31)``.
        """
        if self._lab is None or self._rebuild:
            self.build(seed)
        self.running = False
        # The episode's number is part of what a level may depend on: always the same.
        self.lab.start(0, seed)
        self.frames = 0
        self.reward = 0.0
        self.truncated = False
        self.running = True

    def advance(self) -> None:
        """Step once, with what stands in ``discrete`` and ``continuous``.

        Raises:
            RuntimeError: if no episode is under way.
        """
        if not self.running:
            raise RuntimeError(
                "Lab2d was to be advanced past the end of its episode, which may "
                "abort the process: call reset() first."
            )
        lab = self._lab
        self.running = False  # stays so if Lab2d raises
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

    def stop(self) -> None:
        """Refuse to be advanced until the next start."""
        self.running = False

    def fields(self) -> dict[str, Field]:
        """Return shape and dtype of every observation that the level offers.

        Strings have the dtype object; a 0 in a shape means that it changes.
        """
        specs = {n: self.lab.observation_spec(n) for n in self.lab.observation_names()}
        return {
            name: Field(tuple(spec["shape"]), np.dtype(spec["dtype"]))
            for name, spec in specs.items()
        }

    def events(self) -> Sequence[tuple[str, Sequence[Any]]]:
        """Return the events of the last start or advance: names and what came along."""
        if self._lab is None:
            return []
        events: Sequence[tuple[str, Sequence[Any]]] = self._lab.events()
        return events

    def image(self, name: str) -> NDArray[np.uint8] | None:
        """Return an image of the running or just ended episode."""
        if self._lab is None or (self.frames == 0 and not self.running):
            return None
        image: NDArray[np.uint8] = self._lab.observation(name)
        return image

    def close(self) -> None:
        """Give the Lab2d back."""
        self.running = False
        self._closed = True
        self._lab = None

    def _number(self, key: str) -> int | None:
        try:
            return int(float(self._lab.read_property(key)))
        except (KeyError, ValueError):
            return None
