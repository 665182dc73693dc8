"""What is asked of a cluster, checked before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, final

from marl_collect.collectors.multi_sync import MultiSyncCollector
from marl_collect.collectors.options import CollectorKeywords, CollectorOptions
from marl_collect.collectors.single import Collector

Configs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
_KINDS = (Collector, MultiSyncCollector)
ELSEWHERE = {
    "num_workers": "num_collectors actors have num_workers_per_collector workers each",
    "worker_idx": "the actors' environments are numbered one after the other",
    "weight_sync_schemes": "weights reach the nodes through Ray's object store",
}
_SYNC_ONLY = ("preemptive_threshold", "prefetch", "cat_results")
# What all actors' collectors are told as it is.
SENT = (
    "max_frames_per_traj",
    "reset_at_each_iter",
    "exploration_type",
    "track_traj_ids",
    "num_sub_threads",
    "init_fn",
    "timeout",
    "start_timeout",
    "start_method",
    "preload",
    "on_worker_failure",
    "max_worker_rss",
    "check_actions",
    "trust_policy",
    "compile_policy",
    "cudagraph_policy",
    "compact_obs",
    "env_device",
)
# What the trainer works out for each actor, and what it does itself.
HERE = (
    "frames_per_batch",
    "envs_per_worker",
    "create_env_kwargs",
    "policy_factory",
    "policy_device",
    "device",
    "seed",
    "total_frames",
    "init_random_frames",
    "postproc",
    "update_at_each_batch",
    "set_truncated",
    "track_policy_version",
    "num_threads",
    "storing_device",
    "split_trajs",
    "trajs_per_batch",
    "traj_format",
    "cat_results",
    "use_buffers",
    "preemptive_threshold",
    "prefetch",
    "max_staleness",
    "replay_buffer",
    "extend_buffer",
    "no_cuda_sync",
    "weight_recv_schemes",
)


class RayKeywords(CollectorKeywords, total=False):
    """The keyword arguments of RayCollector; see RayOptions and CollectorOptions."""

    num_collectors: int | None
    num_workers_per_collector: int
    sync: bool
    max_restarts: int
    remote_configs: Configs
    ray_init_config: Mapping[str, Any] | None


@final
@dataclass(frozen=True)
class RayOptions:
    """What a RayCollector is asked for beside what every collector is.

    Attributes:
        num_collectors: actors; as many as ``create_env_fn`` has factories if None.
        num_workers_per_collector: worker processes of each actor.
        collector_class: what an actor runs: ``Collector``, which needs no further
            process, or ``MultiSyncCollector``; None for the one that fits.
        sync: one batch of all actors, in their order; else every batch is one
            actor's, first come.
        max_restarts: how often an actor that was lost, with its node or alone, is
            started anew; -1 for as often as it takes. Three times in a row without
            a batch is an error in any case.
        remote_configs: Ray's options of each actor (``num_cpus``, ``num_gpus``,
            ``memory``, ``resources``, ``scheduling_strategy``, ``runtime_env``, ...),
            or a list with one for each. ``num_cpus`` is its workers if not given.
        ray_init_config: arguments of ``ray.init``, where this process is not
            connected to a Ray yet.
    """

    num_collectors: int | None = None
    num_workers_per_collector: int = 1
    collector_class: Any = None
    sync: bool = False
    max_restarts: int = 3
    remote_configs: Configs = None
    ray_init_config: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, keywords: Mapping[str, Any]) -> tuple[Self, CollectorOptions]:
        """Check the user's keywords, and part them.

        Raises:
            TypeError: for a keyword that does not exist, is missing, or is another
                collector's.
            ValueError: for a value that makes no sense, with what it must be.
        """
        own = {f.name for f in fields(cls)}
        for name, instead in ELSEWHERE.items():
            if keywords.get(name) is not None:
                raise TypeError(f"RayCollector takes no {name}: {instead}.")
        options = cls(**{name: keywords[name] for name in keywords if name in own})
        rest = {name: keywords[name] for name in keywords if name not in own}
        common = CollectorOptions.parse(rest, sorted(own))
        options._check(rest)
        return options, common

    @property
    def kind(self) -> Any:
        """The class of an actor's collector."""
        if self.collector_class is not None:
            return self.collector_class
        return Collector if self.num_workers_per_collector == 1 else MultiSyncCollector

    @property
    def has_workers(self) -> bool:
        """Whether an actor's collector has processes of its own."""
        return self.kind is MultiSyncCollector

    def remote(self, index: int) -> dict[str, Any]:
        """Return Ray's options of one actor."""
        configs = self.remote_configs
        chosen: Mapping[str, Any] = {}
        if isinstance(configs, Mapping):
            chosen = configs
        elif configs is not None:
            # Of a list, later actors take turns: more may be added than it has.
            chosen = configs[index % len(configs)]
        return {"num_cpus": self.num_workers_per_collector, **chosen}

    def _check(self, rest: Mapping[str, Any]) -> None:
        for name in ("num_collectors", "num_workers_per_collector"):
            value = getattr(self, name)
            if value is not None and (not _whole(value) or value < 1):
                raise ValueError(
                    f"{name} must be an integer of at least 1, but is {value!r}."
                )
        if not _whole(self.max_restarts) or self.max_restarts < -1:
            raise ValueError(
                "max_restarts must be an integer of at least 0, or -1 for no limit, "
                f"but is {self.max_restarts!r}."
            )
        if self.collector_class not in (None, *_KINDS):
            raise ValueError(
                "collector_class must be Collector or MultiSyncCollector, but is "
                f"{self.collector_class!r}."
            )
        if self.kind is Collector and self.num_workers_per_collector > 1:
            raise ValueError(
                "Collector has no workers, but num_workers_per_collector is "
                f"{self.num_workers_per_collector}: use MultiSyncCollector, or "
                "envs_per_worker for several environments in one process."
            )
        self._check_mode(rest)
        configs = self.remote_configs
        if configs is None or isinstance(configs, Mapping):
            return
        if not configs or len(configs) != (self.num_collectors or len(configs)):
            raise ValueError(
                f"remote_configs has {len(configs)} entries, expected one for each "
                f"of {self.num_collectors} actors, or one for all."
            )

    def _check_mode(self, rest: Mapping[str, Any]) -> None:
        if self.sync and rest.get("max_staleness") is not None:
            raise TypeError("max_staleness is about async collection: use sync=False.")
        for name in () if self.sync else _SYNC_ONLY:
            if rest.get(name) is not None and rest.get(name) is not False:
                raise TypeError(
                    f"{name} is about batches that all actors fill together: use "
                    "sync=True."
                )


def sent(options: CollectorOptions) -> dict[str, Any]:
    """Return what all actors' collectors are told."""
    return {name: getattr(options, name) for name in SENT}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
