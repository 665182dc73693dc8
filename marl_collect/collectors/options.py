"""Every option of the collectors, checked in one place before anything starts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, final

import torch
from tensordict.nn import InteractionType

from marl_collect.collectors.option_checks import POLICY, check, each_device
from marl_collect.policies.choose import ActingOptions
from marl_collect.trajectories import TrajFormat
from marl_collect.weights import SharedMemoryWeights, WeightScheme

ExplorationType: TypeAlias = InteractionType
"""How policies choose: RANDOM draws, MODE, MEAN and DETERMINISTIC do not."""

Device = torch.device | str | int
DeviceChoice = Device | Sequence[Device] | None
CatResults = Literal["stack", 0, -1] | None
OnFailure = Literal["raise", "restart"]
StartMethod = Literal["forkserver", "spawn"]
Postproc = Callable[[Any], Any]


class WeightSource(Protocol):
    """Something that weights can be asked of, such as another machine."""

    def receive(self) -> Any:
        """Return a module, a state_dict or a TensorDict of parameters."""


class CollectorKeywords(TypedDict, total=False):
    """The keyword arguments that the collectors share; see CollectorOptions."""

    frames_per_batch: int | Sequence[int]
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
    start_method: StartMethod
    preload: Sequence[str]
    device: DeviceChoice
    storing_device: Device | None
    policy_device: DeviceChoice
    env_device: DeviceChoice
    split_trajs: bool
    trajs_per_batch: int | None
    traj_format: TrajFormat
    cat_results: CatResults
    use_buffers: bool
    preemptive_threshold: float | None
    prefetch: bool
    max_staleness: int | None
    replay_buffer: Any
    extend_buffer: bool
    on_worker_failure: OnFailure
    max_worker_rss: int | None
    check_actions: bool
    trust_policy: bool
    compile_policy: bool | Mapping[str, Any]
    cudagraph_policy: bool | Mapping[str, Any]
    no_cuda_sync: bool
    worker_idx: int | None
    compact_obs: bool
    collector_class: Any
    weight_sync_schemes: Mapping[str, WeightScheme] | None
    weight_recv_schemes: Mapping[str, WeightSource] | None


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
        preload: further modules that the fork server imports before it forks, such
            as the environment's; one that starts threads is refused.
        device: default of the three devices below.
        storing_device: where batches are handed out; None for where they are.
        policy_device: where workers act, or a list with one per worker; the CPU if
            None.
        env_device: of the environments: the CPU, which is all they can do.
        split_trajs: hand out ``[n, longest]``, cut at trajectory borders; see
            :func:`~marl_collect.trajectories.split_trajectories`.
        trajs_per_batch: hand out so many whole trajectories instead of frames.
        traj_format: of these: ``"padded"`` ``[k, longest]``, or ``"cat"``.
        cat_results: None gives ``[B, T]``; ``"stack"`` ``[W, *K, T]`` with the K
            environments of a worker, if there are several; 0 and -1 concatenate the
            workers' batches along that dimension.
        use_buffers: False hands out copies, which no slot is kept for.
        preemptive_threshold: when this share of the workers is done, the others stop
            where they are: their remaining frames are zeros with ``traj_ids`` -1 and
            ``("collector", "mask")`` False. None and 1.0 wait for all.
        prefetch: collect the next batch while the learner trains with this one; its
            weights are then exactly one batch older.
        max_staleness: in async collection, how many batches may be handed out
            between the command to collect a batch and the batch itself.
        replay_buffer: anything with ``extend``: batches go there, ``[B * T]``, and
            the iterator yields None.
        extend_buffer: must be True: see docs/collectors.md.
        on_worker_failure: ``"raise"`` or ``"restart"``: a new worker takes the place
            of one that died, hung or raised, and collects its rows again.
        max_worker_rss: bytes of resident memory above which a worker is replaced, after
            a batch, by a new process that goes on where it was.
        check_actions: look at every action of the policy before an environment takes
            it: what is not finite, or no action at all, is a ``PolicyError``.
        trust_policy: take a callable as it is, as one on TensorDicts.
        compile_policy: run ``torch.compile`` on the policy where it acts, with these
            arguments.
        cudagraph_policy: record the policy as a CUDA graph where it acts, which must
            be on a GPU; with these arguments of ``tensordict.nn.CudaGraphModule``.
        no_cuda_sync: do not wait for the copy to a ``storing_device`` on a GPU.
        worker_idx: of a single collector among several that belong together: its
            environments are numbered from ``worker_idx * B``.
        compact_obs: leave ``("next", g, "observation")`` out, which halves the memory
            of a batch; see :func:`~marl_collect.last_observations.restore_next`.
        collector_class: what runs in the workers: ``Collector``, or None for the same.
        weight_sync_schemes: ``{"policy": scheme}``, how weights reach the workers;
            shared memory if not given.
        weight_recv_schemes: ``{"policy": source}``: where ``receive_weights()`` gets
            them from, if nothing is passed to it.
    """

    frames_per_batch: int | Sequence[int]
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
    start_method: StartMethod = "forkserver"
    preload: Sequence[str] = ()
    device: DeviceChoice = None
    storing_device: Device | None = None
    policy_device: DeviceChoice = None
    env_device: DeviceChoice = None
    split_trajs: bool = False
    trajs_per_batch: int | None = None
    traj_format: TrajFormat = "padded"
    cat_results: CatResults = None
    use_buffers: bool = True
    preemptive_threshold: float | None = None
    prefetch: bool = False
    max_staleness: int | None = None
    replay_buffer: Any = None
    extend_buffer: bool = True
    on_worker_failure: OnFailure = "raise"
    max_worker_rss: int | None = None
    check_actions: bool = False
    trust_policy: bool = False
    compile_policy: bool | Mapping[str, Any] = False
    cudagraph_policy: bool | Mapping[str, Any] = False
    no_cuda_sync: bool = False
    worker_idx: int | None = None
    compact_obs: bool = False
    collector_class: Any = None
    weight_sync_schemes: Mapping[str, WeightScheme] | None = None
    weight_recv_schemes: Mapping[str, WeightSource] | None = None

    @classmethod
    def parse(cls, keywords: Mapping[str, Any], others: Sequence[str] = ()) -> Self:
        """Check the user's keywords.

        Args:
            keywords: of these options.
            others: keywords that a misspelt one may mean too.

        Raises:
            TypeError: for a keyword that does not exist or is missing.
            ValueError: for a value that makes no sense, with what it must be.
        """
        known = {f.name for f in fields(cls)}
        for name in keywords:
            if name not in known:
                raise TypeError(_unknown(name, known | set(others)))
        if "frames_per_batch" not in keywords:
            raise TypeError("frames_per_batch must be given: frames of a batch.")
        options = cls(**keywords)
        check(options)
        return options

    @property
    def endless(self) -> bool:
        """Whether no total number of frames was asked for."""
        return self.total_frames is None or self.total_frames < 0

    def policy_device_of(self, worker: int) -> torch.device:
        """Return where a worker's policy acts.

        Raises:
            ValueError: if a list of devices does not reach that worker.
        """
        choice = self.device if self.policy_device is None else self.policy_device
        devices = each_device(choice) or ["cpu"]
        if len(devices) == 1:
            return torch.device(devices[0])
        if worker >= len(devices):
            raise ValueError(
                f"policy_device has {len(devices)} entries, but there is a worker "
                f"{worker}: give one for each worker, or one for all."
            )
        return torch.device(devices[worker])

    def acting(self, worker: int) -> ActingOptions:
        """Return how a worker's policy shall act."""
        return ActingOptions(
            device=str(self.policy_device_of(worker)),
            compile_policy=_arguments(self.compile_policy),
            cudagraph_policy=_arguments(self.cudagraph_policy),
            exploration=self.exploration_type,
            check_actions=self.check_actions,
        )

    @property
    def store_on(self) -> torch.device | None:
        """Where batches are handed out, None for where they are."""
        choice = self.device if self.storing_device is None else self.storing_device
        devices = {torch.device(device) for device in each_device(choice)}
        if len(devices) > 1:
            raise ValueError(
                "storing_device must be one: a batch is one TensorDict, but found "
                f"{sorted(map(str, devices))}."
            )
        return next(iter(devices), None)

    @property
    def weight_scheme(self) -> WeightScheme:
        """How weights reach the workers."""
        schemes = self.weight_sync_schemes or {}
        return schemes.get(POLICY) or SharedMemoryWeights()

    def batches(self, frames: int) -> float:
        """Return how many batches of ``frames`` frames there will be."""
        if self.total_frames is None or self.endless:
            return math.inf
        return math.ceil(self.total_frames / frames)

    @property
    def ragged(self) -> bool:
        """Whether some frames of a batch may be invalid."""
        return self.preempts or not isinstance(self.frames_per_batch, int)

    @property
    def preempts(self) -> bool:
        """Whether slow workers are stopped early."""
        return self.preemptive_threshold is not None and self.preemptive_threshold < 1

    def frames_of(self, environments: Sequence[int]) -> list[int]:
        """Return the frames that each environment of each worker gives per batch.

        Args:
            environments: how many environments each worker has.

        Raises:
            ValueError: if a list of frames does not fit the workers.
        """
        frames = self.frames_per_batch
        if isinstance(frames, int):
            return [-(-frames // sum(environments))] * len(environments)
        if len(frames) != len(environments):
            raise ValueError(
                f"frames_per_batch has {len(frames)} entries, expected one for each of "
                f"{len(environments)} workers, or one number for all together."
            )
        return [-(-f // n) for f, n in zip(frames, environments, strict=True)]


def _arguments(
    choice: bool | Mapping[str, Any],  # noqa: FBT001 - the user's own switch
) -> Mapping[str, Any] | None:
    """Return the arguments that a switch stands for, None if it is off."""
    if choice is False:
        return None
    return {} if choice is True else choice


def _unknown(name: str, known: set[str]) -> str:
    near = get_close_matches(name, known, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"Collectors have no argument {name!r}.{hint} "
        "docs/coming_from_torchrl.md lists what TorchRL's arguments became."
    )
