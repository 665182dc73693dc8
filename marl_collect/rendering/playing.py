"""Takes pictures of episodes while a policy plays them."""

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from marl_collect.collectors import Collector, ExplorationType
from marl_collect.core.description import EnvDescription
from marl_collect.core.env import require_factory
from marl_collect.core.env_wrapper import EnvWrapper
from marl_collect.errors import warn
from marl_collect.options import Option, require
from marl_collect.rendering.overlay import caption, used_part, write_above
from marl_collect.rendering.pictures import Picture, SingleEnv, require_single, take
from marl_collect.rollout.episodes import Curriculum


def play(  # noqa: PLR0913 - one per decision
    create_env_fn: Callable[[], Any],
    policy: Any = None,
    *,
    episodes: int = 1,
    max_frames_per_traj: int | None = None,
    deterministic: bool = True,
    seed: int = 0,
    overlay: bool = False,
    curriculum: Curriculum | None = None,
    level: int = 0,
    max_frames: int | None = None,
) -> Iterator[Picture]:
    """Yield a picture of every frame of complete episodes, including the first.

    The environment is built and stepped in this process. Pictures are not kept, so
    videos may be long.

    Args:
        create_env_fn: the factory; PettingZoo's need ``render_mode="rgb_array"``.
        policy: as for collectors; None for random actions.
        episodes: number of episodes.
        max_frames_per_traj: truncate episodes at this length.
        deterministic: take deterministic actions instead of sampling them.
        seed: of the episodes and the actions.
        overlay: whether to write episode, step, and each agent's return so far above
            the picture. Small pictures are enlarged. Needs the extra ``video``.
        curriculum: returns the task of an episode; as for collectors.
        level: of the curriculum.
        max_frames: old name of ``max_frames_per_traj``.

    Raises:
        TypeError: if both names of ``max_frames_per_traj`` are used, or an argument has
            another type.
        ValueError: if the environment renders no pictures, or there are no episodes.
    """
    if max_frames is not None:
        if max_frames_per_traj is not None:
            raise TypeError(
                "play() got max_frames_per_traj and its old name max_frames: pass one."
            )
        warn(
            "play(): max_frames is now called max_frames_per_traj, as for collectors.",
            DeprecationWarning,
        )
        max_frames_per_traj = max_frames
    require_factory(create_env_fn, "create_env_fn")
    episodes = require("episodes", episodes, int, Option("", at_least=1))
    require("deterministic", deterministic, bool, Option(""))
    require("overlay", overlay, bool, Option(""))
    taken: list[Picture] = []
    filmed = _Filmed(require_single(create_env_fn()), taken.append, overlay=overlay)
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    collector = Collector(
        lambda: filmed,
        policy,
        frames_per_batch=1,  # Pictures are yielded frame by frame.
        max_frames_per_traj=max_frames_per_traj,
        exploration_type=kind,
        seed=seed,
        curriculum=curriculum,
        level=level,
        # Every rank plays the same episodes.
        rank=0,
        world_size=1,
    )
    with collector:
        ended = 0
        while ended < episodes:
            before = collector.stats()["episodes"]
            collector.next()
            ended += collector.stats()["episodes"] - before
            if ended == episodes:
                taken.pop()  # The first picture of the next episode, which has begun.
            yield from taken
            taken.clear()


@final
class _Filmed(EnvWrapper):
    """Passes on a picture after each reset and step."""

    def __init__(
        self,
        env: SingleEnv,
        show: Callable[[Picture], None],
        *,
        overlay: bool,
    ) -> None:
        super().__init__(env)
        self._filmed = env
        self._show = show
        self._part: tuple[slice, slice] | None = None
        """What the first picture used; the margin of later ones is cut, too."""
        groups = env.description.groups
        self._agents = {name: group.agents for name, group in groups.items()}
        self._overlay = overlay
        self._episode = -1
        self._step = 0
        self._returns: dict[str, NDArray[Any]] = {}

    @property
    @override
    def description(self) -> EnvDescription:
        return self.env.description  # With its name, for errors.

    @override
    def after_reset(self, begun: Any, seed: Any) -> None:
        self._episode += 1
        self._step = 0
        self._returns = {n: np.zeros(len(agents)) for n, agents in self._agents.items()}
        self._show(self._picture())

    @override
    def after_step(self) -> None:
        self._step += 1
        for name, returns in self._returns.items():
            returns += self.row[name, "reward"][:, 0]
        self._show(self._picture())

    def _picture(self) -> Picture:
        picture = take(self._filmed)
        if getattr(self._filmed, "has_unused_margin", False):
            self._part = self._part or used_part(picture)
            picture = picture[self._part]
        if not self._overlay:
            return picture
        lines = caption(self._episode, self._step, self._returns, self._agents)
        return write_above(picture, lines)
