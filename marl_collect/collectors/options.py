"""The options of the collectors; see ``marl_collect.options``.

``WorkerOptions`` configure workers and policies, also for evaluation. ``BatchOptions``
configure what is collected and how it is delivered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from tensordict.nn import InteractionType

from marl_collect.buffers import layout
from marl_collect.buffers.trajectories import LONGEST, TrajFormat
from marl_collect.core.description import EnvDescription
from marl_collect.core.device_check import usable_device
from marl_collect.core.factories import Factory, check_function, spread
from marl_collect.core.ranks import Ranks
from marl_collect.core.seeding import LARGEST_SEED
from marl_collect.core.signature import PolicySignature
from marl_collect.options import Option, RejectedKeyword, one_for_each, only
from marl_collect.policies.assigned import Assign
from marl_collect.policies.choose import ActingOptions
from marl_collect.processes.options import WITHOUT_WORKERS, ProcessOptions
from marl_collect.rollout.episodes import Curriculum, Plan
from marl_collect.weights.shared import SharedMemoryWeights

POLICY = "policy"
"""The only key of ``weight_sync_schemes`` and ``weight_recv_schemes``."""

ExplorationType: TypeAlias = InteractionType
"""How policies choose actions: RANDOM samples; MODE, MEAN and DETERMINISTIC do not."""

Device = torch.device | str | int
DeviceChoice = Device | Sequence[Device] | None
CatResults = Literal["stack", 0, -1] | None
OnFailure = Literal["raise", "restart"]
Postproc = Callable[[Any], Any]

MOST_FRAMES = 2**32
"""The most frames of a batch. Even with the smallest frames it has many gigabytes."""
_MOST_PROCESSES = 10_000
_FRAMES_HINT = (
    "It counts the frames of a batch over all environments, such as "
    "frames_per_batch=2_000. The memory of a batch is reserved at the start."
)

# Collectors and functions that refuse an option, with the reason.
_TOGETHER = {
    "MultiAsyncCollector": "it is about batches that all workers fill together: use "
    "MultiSyncCollector",
    "RayCollector(sync=False)": "it is about batches that all actors fill together: "
    "use sync=True",
}
_ASYNC = {
    "MultiSyncCollector": "it is about async collection: use MultiAsyncCollector",
    "RayCollector(sync=True)": "it is about async collection: use sync=False",
}
_NUMBERED = (
    "it numbers the environments of all its workers: use rank and world_size for "
    "several collectors"
)
_SHAPES = {
    "record": "record() needs unchanged batches, which it writes itself: omit it"
}

_BY_CLASS = "each kind of collector is a class: MultiCollector(sync=...), RayCollector"
_WHOLE = "the replay buffer always gets whole batches"
_OWN_LOOP = "put this code into your loop over the batches"
TORCHRL = {
    "weight_updater": RejectedKeyword("use weight_sync_schemes", only(None)),
    "extend_buffer": RejectedKeyword(_WHOLE, only(True)),
    "replay_buffer_chunk": RejectedKeyword(_WHOLE, only(None, True)),
    "local_init_rb": RejectedKeyword(_WHOLE, only(None, True)),
    "trajs_per_write": RejectedKeyword(
        "use trajs_per_batch: complete trajectories go to the buffer",
        only(None),
    ),
    "return_same_td": RejectedKeyword(
        "batches are already views of shared memory", only(False)
    ),
    "reset_when_done": RejectedKeyword(
        "a new episode always begins when one ends", only(True)
    ),
    "interruptor": RejectedKeyword("use preemptive_threshold", only(None)),
    "backend": RejectedKeyword(_BY_CLASS, only(None)),
    "backend_options": RejectedKeyword(_BY_CLASS, only(None)),
    "num_collectors": RejectedKeyword(f"use num_workers; {_BY_CLASS}", only(None)),
    "sync": RejectedKeyword(_BY_CLASS, only(None)),
    "collector_class": RejectedKeyword(
        "every worker runs Collector's loop",
        lambda value: getattr(value, "__name__", "Collector") == "Collector",
    ),
    "env_device": RejectedKeyword(
        "environments run on the CPU: choose storing_device and policy_device",
        only(None, "cpu", torch.device("cpu")),
    ),
    "auto_register_policy_transforms": RejectedKeyword(
        "hidden states and is_init are carried without transforms",
        only(None, False, True),
    ),
    "pre_collect_hook": RejectedKeyword(_OWN_LOOP, only(None)),
    "post_collect_hook": RejectedKeyword(_OWN_LOOP, only(None)),
}
"""Keywords of TorchRL that do not exist here, with advice.

Values that ask for our default behaviour are accepted.
"""
_ENVS_OR_POLICY = "use getattr_env(name) or getattr_policy(name)"
_FIXED = (
    "the number of workers is chosen at the start: build another collector with the "
    "new number, and pass it collector.policy"
)
_SCHEMES = "weights are sent to workers by update_policy_weights_()"
TORCHRL_ATTRIBUTES = {
    "add_collectors": _FIXED,
    "cascade_execute": _ENVS_OR_POLICY,
    "enable_profile": "profile a Collector, which collects in this process",
    "env": "environments live where they are stepped: use getattr_env(name)",
    "get_distant_attr": _ENVS_OR_POLICY,
    "get_policy_version": "use policy_version",
    "map_fn": _ENVS_OR_POLICY,
    "register_scheme_receiver": _SCHEMES,
    "remove_collectors": _FIXED,
    "rollout": "use next()",
    "weight_updater": _SCHEMES,
}
"""Attributes of TorchRL's collectors that are missing here, with replacements."""


LEVEL = Option(
    "with `curriculum`: the level at the start", at_least=0, at_most=LARGEST_SEED
)


class WeightSource(Protocol):
    """A source of weights, such as another machine."""

    def receive(self) -> Any:
        """Return a module, a state_dict or a TensorDict of parameters."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ProcessOptions):
    """Options of workers and policies."""

    rejected_keywords: ClassVar[Mapping[str, RejectedKeyword]] = TORCHRL
    workers_elsewhere: ClassVar[bool] = False
    """Whether workers may run on other machines."""

    num_workers: Annotated[
        int | None,
        Option(
            "number of worker processes. None: one per entry of a list of factories, 1 "
            "for a single factory",
            at_least=1,
            at_most=_MOST_PROCESSES,
            not_in={
                "RayCollector": "num_collectors actors have num_workers_per_collector "
                "workers each"
            },
        ),
    ] = None
    envs_per_worker: Annotated[
        int,
        Option(
            "environments per worker; one forward pass acts for all of them",
            at_least=1,
        ),
    ] = 1
    create_env_kwargs: Annotated[
        Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        Option(
            "keyword arguments of every factory, or a list with one mapping per worker"
        ),
    ] = None
    policy_factory: Annotated[
        Callable[[], Any] | Sequence[Callable[[], Any]] | None,
        Option(
            "a callable that builds the policy in each worker, or a list of one per "
            "worker"
        ),
    ] = None
    policies: Annotated[
        Mapping[str, Any] | None,
        Option(
            "several policies by name, instead of `policy`: modules, callables, or "
            "None for random actions; requires `assign`. "
            '`(g, "policy_id")`, int64 `[B, T, n]`, is the index of the policy that '
            "acted. See [several policies](populations.md)",
            checked=False,
        ),
    ] = None
    assign: Annotated[
        Assign | None,
        Option(
            "with `policies`: `assign(seed, agents)` returns `{agent: name of its "
            "policy}` for the episode of this seed. It is called in the process that "
            "steps the environment, and must depend only on its arguments",
            checked=False,
        ),
    ] = None
    init_fn: Annotated[
        Callable[[], Any] | None,
        Option("called in every worker before anything is built"),
    ] = None
    curriculum: Annotated[
        Curriculum | None,
        Option(
            "`curriculum(seed, episode, level)` returns the task of an episode, which "
            "its environment is told before it resets. `set_level` changes the level "
            'of episodes that begin later; `("collector", "level")`, int64 `[B, T]`, '
            "is that of each frame's episode. It is called in the process that steps "
            "the environment, and must depend only on its arguments. See "
            "[curricula](environments.md#curricula)",
            checked=False,
        ),
    ] = None
    level: Annotated[int, LEVEL] = 0
    device: Annotated[
        DeviceChoice, Option("default of `storing_device` and `policy_device`")
    ] = None
    policy_device: Annotated[
        DeviceChoice,
        Option(
            "device on which the policy acts, or a list of one per worker. If neither "
            "this nor `device` is given, workers act on the CPU, and `Collector` acts "
            "on the module's device. Environments run on the CPU, except for "
            "[simulators on a device](environments.md#simulators-on-a-device), where "
            "the policy of a `Collector` must be too"
        ),
    ] = None
    on_worker_failure: Annotated[
        OnFailure,
        Option(
            '`"raise"`, or `"restart"`: a new worker replaces a worker that died, hung '
            "or raised an error. It begins its environments' next episodes and "
            "collects its rows again. `stats()` counts restarts and lists the cut "
            "trajectories. A replacement that fails before its first batch is an error",
            not_in=WITHOUT_WORKERS,
        ),
    ] = "raise"
    max_worker_rss: Annotated[
        int | None,
        Option(
            "for environments that leak memory: when the resident memory of a worker "
            "exceeds this many bytes after a batch, a new process replaces it and "
            "resumes exactly. Environments that cannot repeat an episode, or whose "
            "replay leads to a different frame, begin new episodes. "
            '`stats()["recycled"]` counts the replacements',
            at_least=1,
            not_in=WITHOUT_WORKERS,
        ),
    ] = None
    check_actions: Annotated[
        bool,
        Option(
            "check every action before the environment gets it. An action that is not "
            "finite, not in a space of integers or illegal raises a `PolicyError` that "
            "names group, agent and frame. Without this check, invalid actions reach "
            "the environment, which may refuse them"
        ),
    ] = False
    trust_policy: Annotated[
        bool,
        Option(
            "call the policy on TensorDicts without inspecting its arguments",
            off=(None,),
        ),
    ] = False
    compile_policy: Annotated[
        bool | Mapping[str, Any],
        Option(
            "use `torch.compile` on the policy: True, or its arguments", off=(None,)
        ),
    ] = False
    cudagraph_policy: Annotated[
        bool | Mapping[str, Any],
        Option(
            "record the policy as a CUDA graph; needs a `policy_device` on a GPU. "
            "True, or the arguments of `tensordict.nn.CudaGraphModule`",
            off=(None,),
        ),
    ] = False

    def __post_init__(self) -> None:
        """Check every value, and those that go together."""
        super().__post_init__()
        _check_workers(self)

    def factories(
        self, create_env_fn: Factory | Sequence[Factory], workers: int | None = None
    ) -> list[list[Factory]]:
        """Return the factories of each worker's environments; see ``spread``.

        Args:
            create_env_fn: a factory or a list of them.
            workers: their number; None for ``num_workers``.
        """
        number, kwargs = workers or self.num_workers, self.create_env_kwargs
        return spread(create_env_fn, number, self.envs_per_worker, kwargs)

    def policy_factories(self, workers: int) -> list[Callable[[], Any] | None]:
        """Return the policy factory of each worker, None for the trainer's policy.

        Raises:
            ValueError: if a list has another length.
        """
        return one_for_each("policy_factory", self.policy_factory, workers)

    @property
    def policy_devices(self) -> list[torch.device]:
        """The device on which all policies act, or that of each worker's policy."""
        choice = self.device if self.policy_device is None else self.policy_device
        return list(map(torch.device, _each_device(choice) or ["cpu"]))

    def policy_devices_of(self, workers: int) -> list[torch.device]:
        """Return the device of each worker's policy.

        Raises:
            ValueError: if a list has neither one device nor one for each worker.
        """
        devices = self.policy_devices
        chosen = devices[0] if len(devices) == 1 else devices
        return one_for_each("policy_device", chosen, workers)


@dataclass(frozen=True, kw_only=True)
class BatchOptions(WorkerOptions):
    """Options of batches and their delivery."""

    total_frames: Annotated[
        int | None,
        Option(
            "stop after the first batch that brings the total to at least this number "
            "of frames. None and -1: never",
            at_least=1,
            off=(-1,),
            not_in=_SHAPES,
        ),
    ] = None
    max_frames_per_traj: Annotated[
        int | None,
        Option(
            "cut trajectories at this length (`truncated`, never `terminated`); writes "
            "`step_count`. None, 0 and -1: never",
            at_least=1,
            off=(0, -1),
        ),
    ] = None
    init_random_frames: Annotated[
        int | None,
        Option(
            "random actions until this many frames are collected, in whole batches. "
            "None and -1: none",
            at_least=0,
            off=(-1,),
        ),
    ] = None
    reset_at_each_iter: Annotated[
        bool,
        Option(
            "begin new episodes at the start of every batch. Not with "
            "`trajs_per_batch`, nor with `record(episodes=...)`"
        ),
    ] = False
    exploration_type: Annotated[
        ExplorationType,
        Option("RANDOM samples actions; MODE, MEAN and DETERMINISTIC do not"),
    ] = ExplorationType.RANDOM
    seed: Annotated[
        int | None,
        Option(
            "seed of all random numbers. In workers it also seeds torch's, numpy's and "
            "Python's global generators, once the environments are built. None: drawn "
            "from torch's generator",
            at_least=0,
            at_most=LARGEST_SEED,
        ),
    ] = None
    worker_idx: Annotated[
        int | None,
        Option(
            "index of this `Collector` among several: its environments are numbered "
            "from `worker_idx * B`. Not with `rank` and `world_size`",
            at_least=0,
            not_in=_SHAPES
            | {
                "MultiSyncCollector": _NUMBERED,
                "MultiAsyncCollector": _NUMBERED,
                "RayCollector": _NUMBERED,
            },
        ),
    ] = None
    rank: Annotated[
        int | None,
        Option(
            "number of this process among `world_size` processes that run the same "
            "program. A collector with B environments numbers them from `rank * B`, so "
            "all ranks together collect what one collector with all environments would "
            "collect for the same `seed`. None: that of `torch.distributed` or "
            "torchrun when the collector is built, or else 0. See "
            "[ranks](distribution.md#ranks)",
            at_least=0,
        ),
    ] = None
    world_size: Annotated[
        int | None,
        Option(
            "number of processes that run the same program; goes with `rank`",
            at_least=1,
        ),
    ] = None
    update_at_each_batch: Annotated[
        bool,
        Option(
            "publish the weights of `collector.policy`, if it has any, before every "
            "batch"
        ),
    ] = False
    preemptive_threshold: Annotated[
        float | None,
        Option(
            "when this fraction of the workers is done, the others stop. Their "
            'remaining frames are zeros with `traj_ids` -1 and `("collector", "mask")` '
            "False, and do not count. None and 1.0 wait for all workers",
            at_least=0,
            at_most=1,
            not_in=WITHOUT_WORKERS | _TOGETHER,
        ),
    ] = None
    prefetch: Annotated[
        bool,
        Option(
            "collect the next batch while you train on this one. Weights are then "
            "exactly one update older. Each worker starts its next batch as soon as it "
            "is done, without waiting for the slowest; with `preemptive_threshold`, "
            "once all are done",
            not_in=WITHOUT_WORKERS | _TOGETHER,
        ),
    ] = False
    max_staleness: Annotated[
        int | None,
        Option(
            "async only: the maximum number of other batches that are delivered "
            "between the start of a batch and its delivery. With one update per batch, "
            "this limits how many versions old its weights are. At most "
            "`max_staleness + 1` workers collect at once, so below `num_workers - 1` "
            "some always wait",
            at_least=0,
            not_in=WITHOUT_WORKERS | _ASYNC | _SHAPES,
        ),
    ] = None
    set_truncated: Annotated[
        bool,
        Option(
            "mark the last frame of every batch as truncated, in the data only: the "
            "episode continues",
            not_in={
                "record": "set_truncated would split episodes at the ends of batches "
                "and list the pieces as whole episodes: limit episodes with "
                "max_frames_per_traj"
            },
        ),
    ] = False
    track_policy_version: Annotated[
        bool,
        Option(
            'write `policy_version` and `("next", "policy_version")`, int64 `[B, T]`: '
            "the version of the weights that chose the action"
        ),
    ] = False
    track_traj_ids: Annotated[
        bool,
        Option(
            'write `("collector", "traj_ids")`, int64 `[B, T]`: '
            "`(environment << 32) + episode`",
            not_in=_SHAPES,
        ),
    ] = True
    compact_obs: Annotated[
        bool,
        Option(
            'omit `("next", g, "observation")`, which halves the memory of a batch. '
            "`marl_collect.restore_next(batch)` restores it exactly, also after rows "
            "were selected, reordered or split into trajectories, and after batches "
            "were joined. Only for batches "
            "`[B, T]`: not with `cat_results`, `split_trajs`, `trajs_per_batch` or "
            "`replay_buffer`"
        ),
    ] = False
    split_trajs: Annotated[
        bool,
        Option(
            'batches `[n, longest]` with `("collector", "mask")`, split at the ends of '
            "trajectories and of the batch, so a piece may begin or end in the middle "
            "of a trajectory",
            off=(None,),
            not_in=_SHAPES,
        ),
    ] = False
    trajs_per_batch: Annotated[
        int | None,
        Option(
            "number of complete trajectories per batch, instead of a number of frames. "
            "The last batch may have fewer: those that are complete when "
            "`total_frames` are collected. Incomplete trajectories are then dropped. "
            "If episodes may never end, set `max_frames_per_traj`: a trajectory of "
            f"more than {LONGEST:,} frames is an error without it. "
            "Not with `set_truncated` or `reset_at_each_iter`",
            at_least=1,
            not_in=_SHAPES,
        ),
    ] = None
    traj_format: Annotated[
        TrajFormat,
        Option(
            'shape of batches with `trajs_per_batch`: `"padded"` `[k, longest]`, or '
            '`"cat"` `[sum of T]`',
            off=(None,),
            not_in=_SHAPES,
        ),
    ] = "padded"
    cat_results: Annotated[
        CatResults,
        Option(
            'None `[B, T]`; `"stack"` `[W, T]` or `[W, K, T]`; 0 and -1 concatenate '
            "the workers' batches along that dimension",
            not_in=_TOGETHER | _SHAPES,
        ),
    ] = None
    postproc: Annotated[
        Postproc | None,
        Option(
            "a function applied to every batch before delivery. With a "
            "`replay_buffer` it must return a TensorDict"
        ),
    ] = None
    storing_device: Annotated[
        Device | None,
        Option(
            "device of the delivered batches; None does not move them",
            not_in=_SHAPES,
        ),
    ] = None
    no_cuda_sync: Annotated[
        bool,
        Option(
            "do not wait for the copy to a `storing_device` on a GPU. A batch is one "
            "copy from pinned memory (one per key for batches by trajectory)"
        ),
    ] = False
    use_buffers: Annotated[
        bool, Option("False: deliver copies, which occupy no slot", off=(None,))
    ] = True
    replay_buffer: Annotated[
        Any,
        Option(
            "an object whose `extend` receives the valid frames of every batch, at "
            "most `[B * T]` (whole trajectories with `trajs_per_batch`). A TorchRL "
            "buffer whose storage has `ndim=2` receives `[B, T]`. The iterator yields "
            "None",
            not_in=_SHAPES,
        ),
    ] = None
    weight_sync_schemes: Annotated[
        Mapping[str, SharedMemoryWeights] | None,
        Option(
            '`{"policy": marl_collect.weights.shared.SharedMemoryWeights()}`, the only '
            "way in which weights reach the workers, like None",
            not_in={
                "Collector": "it acts with the trained module itself: omit it",
                "RayCollector": "weights reach the nodes through Ray's object store",
            },
        ),
    ] = None
    weight_recv_schemes: Annotated[
        Mapping[str, WeightSource] | None,
        Option(
            '`{"policy": source}`: the source that `receive_weights()` reads',
            not_in={"record": "record() receives no weights: omit it"},
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check every value, and those that go together."""
        super().__post_init__()
        _check_batches(self)

    @cached_property
    def ranks(self) -> Ranks:
        """Which process of a distributed job this was when the options were checked."""
        if self.worker_idx is not None:
            return Ranks()
        return Ranks.of(self.rank, self.world_size)

    @property
    def numbering(self) -> dict[str, int | None]:
        """What numbers the environments, as plain data."""
        return asdict(self.ranks) | {"worker_idx": self.worker_idx}

    def environments_from(self, size: int) -> range:
        """Return the numbers of this collector's ``size`` environments."""
        first = (self.worker_idx or self.ranks.rank) * size
        return range(first, first + size)

    def plan(self, seed: int, environments: range) -> Plan:
        """Return the plan of these environments, from a seed that may be drawn."""
        return Plan(
            seed,
            environments,
            self.max_frames_per_traj,
            curriculum=self.curriculum,
            level=self.level,
        )

    def completed(self, frames: int) -> bool:
        """Whether ``frames`` delivered frames are all that was asked for."""
        return self.total_frames is not None and frames >= self.total_frames

    def random_after(self, frames: int) -> bool:
        """Whether a batch that follows ``frames`` frames has random actions."""
        return frames < (self.init_random_frames or 0)

    def acting(self, device: torch.device) -> ActingOptions:
        """Return how a policy acts on this device."""
        return ActingOptions(
            device=str(device),
            compile_policy=_arguments(self.compile_policy),
            cudagraph_policy=_arguments(self.cudagraph_policy),
            exploration=self.exploration_type,
            check_actions=self.check_actions,
        )

    @property
    def store_on(self) -> torch.device | None:
        """Device of delivered batches; None does not move them.

        Raises:
            ValueError: if ``device`` names several, and ``storing_device`` none.
        """
        choice = self.device if self.storing_device is None else self.storing_device
        devices = {torch.device(device) for device in _each_device(choice)}
        if len(devices) > 1:
            raise ValueError(
                "A batch is one TensorDict on one device, but device names "
                f"{sorted(map(str, devices))}: pass storing_device too."
            )
        return next(iter(devices), None)

    @property
    def preempts(self) -> bool:
        """Whether slow workers are preempted."""
        return self.preemptive_threshold is not None and self.preemptive_threshold < 1


@dataclass(frozen=True, kw_only=True)
class CollectorOptions(BatchOptions):
    """All arguments of a collector."""

    create_env_fn: Annotated[
        Factory | Sequence[Factory],
        Option(
            "a factory that builds one environment, or a list of factories",
            checked=False,
        ),
    ] = field(kw_only=False)
    policy: Annotated[
        Any,
        Option(
            "a TensorDict module (possibly lazy or on the meta device) or a callable. "
            "None: random actions"
        ),
    ] = field(default=None, kw_only=False)
    frames_per_batch: Annotated[
        int | Sequence[int],
        Option(
            "number of frames per batch, over all B environments. Each contributes "
            "`T = ceil(frames_per_batch / B)`, with a warning if that is rounded up. A "
            "list has one number per worker; rows are then padded and masked. "
            "`MultiAsyncCollector`: number of frames of one worker's batch",
            at_least=1,
            at_most=MOST_FRAMES,
            hint=_FRAMES_HINT,
        ),
    ]

    def __post_init__(self) -> None:
        """Check every value, the replay buffer and the device of batches."""
        super().__post_init__()
        _check_replay_buffer(self)
        _ = self.store_on  # Refuses several devices before anything starts.

    @property
    def ragged(self) -> bool:
        """Whether some frames of a batch may be invalid."""
        return self.preempts or not isinstance(self.frames_per_batch, int)

    def batch_layout(
        self,
        description: EnvDescription,
        signature: PolicySignature,
        batch: tuple[int, int],
    ) -> layout.Layout:
        """Return the layout of batches of so many environments and frames."""
        optional = {
            layout.TRAJ_IDS: self.track_traj_ids,
            layout.STEP_COUNT: self.max_frames_per_traj is not None,
            layout.VERSION: self.track_policy_version,
            layout.FRAME_IDS: self.compact_obs,
            layout.VALID: self.ragged,
            layout.LEVEL: self.curriculum is not None,
        }
        contents = {key for key, is_wanted in optional.items() if is_wanted}
        fields = layout.batch_fields(description, signature, contents)
        return layout.Layout.plan(fields, batch)

    def frames_of(
        self, environments: Sequence[int], *, together: bool = True
    ) -> list[int]:
        """Return the frames per batch of each environment, by worker.

        Args:
            environments: how many environments each worker has.
            together: whether all workers fill one batch, or each of them its own.

        Raises:
            ValueError: if a list of frames does not fit the workers.
        """
        frames = self.frames_per_batch
        if isinstance(frames, int):
            total = sum(environments)
            return [-(-frames // (total if together else n)) for n in environments]
        chosen = one_for_each("frames_per_batch", frames, len(environments))
        return [-(-f // n) for f, n in zip(chosen, environments, strict=True)]


def _arguments(
    choice: bool | Mapping[str, Any],  # noqa: FBT001 - the user's own switch
) -> Mapping[str, Any] | None:
    """Return the arguments of a feature, None if it is off."""
    if choice is False:
        return None
    return {} if choice is True else choice


def storage_dims(replay_buffer: Any) -> int:
    """Return the batch dimensions of a replay buffer's storage, 1 if not TorchRL's."""
    if not getattr(replay_buffer, "initialized", True):
        len(replay_buffer)  # With `delayed_init`, the first use builds the storage.
    return getattr(getattr(replay_buffer, "_storage", None), "ndim", 1)


def _check_workers(options: WorkerOptions) -> None:
    """Check the curriculum, and the devices of policies.

    Raises:
        TypeError: if the curriculum is no function of three arguments, or cannot be
            sent to workers.
        ValueError: if a device does not exist, or if there is a level without a
            curriculum.
    """
    if options.curriculum is not None:
        example = "curriculum(seed, episode, level)"
        check_function("curriculum", options.curriculum, example, "a task")
    elif options.level:
        raise ValueError("level is that of a curriculum: pass curriculum too.")
    _check_devices("device", options.device)
    here = not options.workers_elsewhere
    _check_devices("policy_device", options.policy_device, here=here)
    if (
        options.cudagraph_policy is not False
        and options.policy_devices[0].type != "cuda"
    ):
        raise ValueError("cudagraph_policy needs a policy on a GPU: set policy_device.")


def _check_batches(options: BatchOptions) -> None:
    """Check the options of batches.

    Raises:
        ValueError: if options exclude each other, or if a device does not exist.
        TypeError: if a replay buffer cannot be extended.
    """
    _check_devices("storing_device", options.storing_device)
    whole = options.trajs_per_batch is not None
    by_trajectory = options.split_trajs or whole
    shaped = by_trajectory or options.cat_results is not None
    stored = options.replay_buffer is not None
    conflicts = {
        "Pass either split_trajs or trajs_per_batch, not both.": (
            options.split_trajs and whole
        ),
        "set_truncated ends trajectories at the end of each batch, and trajs_per_batch "
        "delivers complete ones only: omit set_truncated.": (
            options.set_truncated and whole
        ),
        "reset_at_each_iter cuts trajectories that are longer than the frames of a "
        "batch, and trajs_per_batch delivers complete ones only: omit "
        "reset_at_each_iter.": options.reset_at_each_iter and whole,
        f"traj_format={options.traj_format!r} is the shape of batches with "
        "trajs_per_batch: set trajs_per_batch, or omit traj_format.": (
            options.traj_format != "padded" and not whole
        ),
        "Batches by trajectory need track_traj_ids=True.": (
            by_trajectory and not options.track_traj_ids
        ),
        "cat_results does not apply to batches by trajectory: omit cat_results, or "
        "split_trajs and trajs_per_batch.": (
            by_trajectory and options.cat_results is not None
        ),
        "compact_obs needs plain batches [B, T], because restore_next() needs their "
        "frames in order: omit cat_results, split_trajs, trajs_per_batch and "
        "replay_buffer, and apply them afterwards.": (
            options.compact_obs and (shaped or stored)
        ),
    }
    for message, conflict in conflicts.items():
        if conflict:
            raise ValueError(message)
    _check_ranks(options)
    _check_schemes(options)


def _check_ranks(options: BatchOptions) -> None:
    """Check which ranks collect, and that they deliver the same number of batches.

    Raises:
        ValueError: if that depends on what each of them collects.
    """
    ranks_given = (options.rank, options.world_size) != (None, None)
    if options.worker_idx is not None and ranks_given:
        raise ValueError(
            "worker_idx numbers environments, and so do rank and world_size: pass rank "
            "and world_size without worker_idx."
        )
    several = options.ranks.world_size > 1  # Checks the numbers too.
    if several and (options.preempts or options.trajs_per_batch is not None):
        name = "preemptive_threshold" if options.preempts else "trajs_per_batch"
        refuse_ranks(options, name)


def refuse_ranks(options: BatchOptions, name: str) -> None:
    """Refuse several ranks that end at ``total_frames``, because of what is named.

    Raises:
        ValueError: if there are several, and they end there.
    """
    if options.ranks.world_size > 1 and options.total_frames is not None:
        raise ValueError(
            f"With {name}, the ranks of a job would reach total_frames after different "
            "numbers of batches, and some would wait for the others forever: omit "
            "total_frames, and end the loop after a number of batches. If only this "
            "process collects, pass rank=0 and world_size=1."
        )


def _check_replay_buffer(options: CollectorOptions) -> None:
    """Check that a replay buffer can store the batches.

    Raises:
        TypeError: if it cannot be extended.
        ValueError: if its storage has more dimensions than the batches.
    """
    buffer = options.replay_buffer
    if buffer is None:
        return
    if not callable(getattr(buffer, "extend", None)):
        raise TypeError(f"replay_buffer must have a method extend, but is {buffer!r}.")
    dims = storage_dims(buffer)
    plain = not options.split_trajs and options.trajs_per_batch is None
    plain = plain and options.cat_results is None and not options.ragged
    if dims > 2 or (dims == 2 and not plain):
        raise ValueError(
            f"The storage of replay_buffer has ndim={dims}. Batches [B, T] go into one "
            "with ndim=2, and frames [B * T] into one with ndim=1, the only kind for "
            "cat_results, split_trajs, trajs_per_batch and preemptive_threshold."
        )


def _check_schemes(options: BatchOptions) -> None:
    """Check how weights are sent and received.

    Raises:
        TypeError: if a scheme is no ``SharedMemoryWeights``.
        ValueError: for the name of an unknown model.
    """
    scheme = (options.weight_sync_schemes or {}).get(POLICY)
    if scheme is not None and not isinstance(scheme, SharedMemoryWeights):
        advice = ""
        if type(scheme).__module__.startswith("torchrl."):
            advice = (
                " Workers share memory with the trainer here, so TorchRL's schemes "
                "have no use: omit weight_sync_schemes."
            )
        raise TypeError(
            f"weight_sync_schemes[{POLICY!r}] must be SharedMemoryWeights(), "
            f"but is {scheme!r}.{advice}"
        )
    for name in ("weight_sync_schemes", "weight_recv_schemes"):
        if set(getattr(options, name) or ()) - {POLICY}:
            raise ValueError(
                f"{name} may have the key {POLICY!r} only, but has "
                f"{sorted(getattr(options, name))}."
            )


def _each_device(choice: Any) -> list[Any]:
    """Return a user's choice of devices as a list."""
    if choice is None:
        return []
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        return list(choice)
    return [choice]


def _check_devices(name: str, choice: Any, *, here: bool = True) -> None:
    for device in _each_device(choice):
        usable_device(name, device, here=here)
