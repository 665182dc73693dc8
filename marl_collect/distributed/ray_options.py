"""Options of ``RayCollector``, checked before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from marl_collect.collectors.multi_sync import MultiSyncCollector
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.single import Collector
from marl_collect.core.factories import Factory
from marl_collect.options import Option, RejectedKeyword, declared, refuse

Configs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
_KINDS = (Collector, MultiSyncCollector)
_REAL = {"num_collectors", "collector_class", "sync"}


@dataclass(frozen=True, kw_only=True)
class RayOptions(CollectorOptions):
    """Options of a ``RayCollector`` in addition to those of every collector."""

    rejected_keywords: ClassVar[Mapping[str, RejectedKeyword]] = {
        name: other
        for name, other in CollectorOptions.rejected_keywords.items()
        if name not in _REAL
    }

    num_collectors: Annotated[
        int | None,
        Option(
            "number of actors; default: the number of factories in `create_env_fn`",
            at_least=1,
        ),
    ] = None
    num_workers_per_collector: Annotated[
        int, Option("worker processes of each actor", at_least=1)
    ] = 1
    collector_class: Annotated[
        Any,
        Option(
            "what an actor runs: `Collector` (the actor steps environments itself) or "
            "`MultiSyncCollector`; default: whichever fits"
        ),
    ] = None
    sync: Annotated[
        bool,
        Option(
            "True: one batch from all actors, in their order; False: one batch per "
            "actor, first come, first served"
        ),
    ] = False
    max_restarts: Annotated[
        int,
        Option(
            "how often a lost actor is restarted; 0 raises an error at once, -1 sets "
            "no limit. Three starts in a row without a batch are an error in any case",
            at_least=-1,
        ),
    ] = 3
    remote_configs: Annotated[
        Configs,
        Option(
            "Ray's actor options (`num_cpus`, `num_gpus`, `memory`, `resources`, "
            "`scheduling_strategy`, `runtime_env`), or a list with one per actor; "
            "`num_cpus` defaults to the number of its workers"
        ),
    ] = None
    ray_init_config: Annotated[
        Mapping[str, Any] | None,
        Option("arguments of `ray.init`, if your script has not called it"),
    ] = None

    def __post_init__(self) -> None:
        """Check each value, and the combinations."""
        super().__post_init__()
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
        refuse(self, "RayCollector")
        refuse(self, f"RayCollector(sync={self.sync})")
        configs = self.remote_configs
        if configs is None or isinstance(configs, Mapping):
            return
        if not configs or len(configs) != (self.num_collectors or len(configs)):
            raise ValueError(
                f"remote_configs has {len(configs)} entries, expected one for each "
                f"of {self.num_collectors} actors, or a single mapping for all."
            )

    @property
    def kind(self) -> Any:
        """The class of each actor's collector."""
        if self.collector_class is not None:
            return self.collector_class
        return Collector if self.num_workers_per_collector == 1 else MultiSyncCollector

    @property
    def has_workers(self) -> bool:
        """Whether each actor's collector has worker processes."""
        return self.kind is MultiSyncCollector

    def remote(self, index: int) -> dict[str, Any]:
        """Return Ray's options for one actor."""
        configs = self.remote_configs
        chosen: Mapping[str, Any] = {}
        if isinstance(configs, Mapping):
            chosen = configs
        elif configs is not None:
            # Added actors reuse the entries of the list in turn.
            chosen = configs[index % len(configs)]
        return {"num_cpus": self.num_workers_per_collector, **chosen}

    def sent(self) -> dict[str, Any]:
        """Return the options that are sent to the actors' collectors."""
        return {
            each.name: getattr(self, each.name)
            for each in declared(type(self))
            if each.option.to_actors
        }


@dataclass(frozen=True)
class RayArguments(RayOptions):
    """The arguments of ``RayCollector``."""

    create_env_fn: Annotated[
        Factory | Sequence[Factory],
        Option(
            "a factory for all actors, or a list with one for each actor, for each "
            "worker, or for each environment",
            checked=False,
        ),
    ]
    policy: Annotated[Any, Option("as for other collectors")] = None
