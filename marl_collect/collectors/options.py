"""Every option of the collectors, checked in one place before anything starts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Self, TypedDict, final

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

ExplorationType = InteractionType
"""How policies choose: RANDOM draws, MODE, MEAN and DETERMINISTIC do not."""

Device = torch.device | str | int
Postproc = Callable[[Any], Any]


class CollectorKeywords(TypedDict, total=False):
    """The keyword arguments that the collectors share; see CollectorOptions."""

    frames_per_batch: int
    total_frames: int | None
    num_workers: int | None
    envs_per_worker: int
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None
    max_frames_per_traj: int | None
    init_random_frames: int | None
    reset_at_each_iter: bool
    exploration_type: ExplorationType
    postproc: Postproc | None
    update_at_each_batch: bool
    set_truncated: bool
    track_policy_version: bool
    track_traj_ids: bool
    num_threads: int | None
    num_sub_threads: int
    init_fn: Callable[[], Any] | None
    seed: int | None
    timeout: float | None
    start_timeout: float
    start_method: str


@final
@dataclass(frozen=True)
class CollectorOptions:
    """What a collector is asked for.

    Attributes:
        frames_per_batch: frames of a batch, over all environments. Each of the B
            environments gives ``T = ceil(frames_per_batch / B)``.
        total_frames: end after so many frames; None or -1 for never.
        num_workers: worker processes, where ``create_env_fn`` is one factory.
        envs_per_worker: environments that one worker steps with one forward.
        create_env_kwargs: passed to every factory, or a list with one per worker.
        policy_factory: builds the policy in each worker, or a list with one per
            worker.
        max_frames_per_traj: cut trajectories (``truncated``) at this length.
        init_random_frames: act at random until so many frames are collected.
        reset_at_each_iter: begin new episodes with every batch.
        exploration_type: how the policy chooses.
        postproc: applied to every batch before it is handed out.
        update_at_each_batch: publish the policy's weights before every batch.
        set_truncated: flag the last frame of every batch as truncated.
        track_policy_version: write ``"policy_version"``, int64 ``[B, T]``.
        track_traj_ids: write ``("collector", "traj_ids")``, int64 ``[B, T]``.
        num_threads: torch threads of this process; None leaves them alone.
        num_sub_threads: torch threads of each worker.
        init_fn: called first in every worker.
        seed: everything random is derived from it; drawn from torch if None.
        timeout: seconds without progress after which a worker counts as hung,
            None for never. The trainer's own pauses do not count.
        start_timeout: seconds in which all workers must be ready.
        start_method: ``"forkserver"`` or ``"spawn"``.
    """

    frames_per_batch: int
    total_frames: int | None = None
    num_workers: int | None = None
    envs_per_worker: int = 1
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    exploration_type: ExplorationType = ExplorationType.RANDOM
    postproc: Postproc | None = None
    update_at_each_batch: bool = False
    set_truncated: bool = False
    track_policy_version: bool = False
    track_traj_ids: bool = True
    num_threads: int | None = None
    num_sub_threads: int = 1
    init_fn: Callable[[], Any] | None = None
    seed: int | None = None
    timeout: float | None = 300.0
    start_timeout: float = 300.0
    start_method: str = "forkserver"

    @classmethod
    def parse(cls, keywords: Mapping[str, Any]) -> Self:
        """Check the user's keywords.

        Raises:
            TypeError: for a keyword that does not exist or is missing.
            ValueError: for a value that makes no sense, with what it must be.
        """
        known = {f.name for f in fields(cls)}
        for name in keywords:
            if name not in known:
                raise TypeError(_unknown(name, known))
        if "frames_per_batch" not in keywords:
            raise TypeError("frames_per_batch must be given: frames of a batch.")
        options = cls(**keywords)
        options._check()
        return options

    @property
    def endless(self) -> bool:
        """Whether no total number of frames was asked for."""
        return self.total_frames is None or self.total_frames < 0

    def batches(self, frames: int) -> float:
        """Return how many batches of ``frames`` frames there will be."""
        if self.total_frames is None or self.endless:
            return math.inf
        return math.ceil(self.total_frames / frames)

    def _check(self) -> None:
        _positive("frames_per_batch", self.frames_per_batch)
        _positive("envs_per_worker", self.envs_per_worker)
        _positive("num_sub_threads", self.num_sub_threads)
        for name in ("num_workers", "max_frames_per_traj", "num_threads"):
            value = getattr(self, name)
            if value is not None:
                _positive(name, value)
        if self.total_frames is not None and self.total_frames != -1:
            _positive("total_frames", self.total_frames)
        if self.init_random_frames is not None and self.init_random_frames < 0:
            raise ValueError(
                f"init_random_frames must not be negative: {self.init_random_frames}."
            )
        if self.timeout is not None and self.timeout <= 0:
            raise ValueError(
                f"timeout must be positive seconds or None: {self.timeout}."
            )
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed must not be negative: {self.seed}.")


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, but is {value!r}.")


def _unknown(name: str, known: set[str]) -> str:
    near = get_close_matches(name, known, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"Collectors have no argument {name!r}.{hint} "
        "docs/coming_from_torchrl.md lists what TorchRL's arguments became."
    )


Batch = TensorDictBase
