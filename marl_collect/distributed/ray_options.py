"""Options of ``RayCollector``, checked before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from marl_collect.collectors.options import CollectorOptions
from marl_collect.core.factories import Factory
from marl_collect.options import Option, RejectedKeyword, one_for_each, refuse

Configs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
_REAL = {"num_collectors", "sync"}
_ALIKE = {None, "Collector", "MultiSyncCollector"}
"""Names of collectors whose batches are those of an actor's workers."""


@dataclass(frozen=True, kw_only=True)
class RayOptions(CollectorOptions):
    """The arguments of ``RayCollector``."""

    workers_elsewhere: ClassVar[bool] = True

    rejected_keywords: ClassVar[Mapping[str, RejectedKeyword]] = {
        name: other
        for name, other in CollectorOptions.rejected_keywords.items()
        if name not in _REAL
    } | {
        "collector_class": RejectedKeyword(
            "every actor has workers that run Collector's loop: use "
            "num_workers_per_collector for their number, and sync for how batches are "
            "made of their frames",
            lambda value: getattr(value, "__name__", value) in _ALIKE,
        )
    }

    create_env_fn: Annotated[
        Factory | Sequence[Factory],
        Option(
            "a factory for all actors, or a list with one for each actor, for each "
            "worker, or for each environment",
            checked=False,
        ),
    ] = field(kw_only=False)
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
            "maximum number of restarts of an actor that is lost, or whose worker died "
            "or hung; 0 raises an error at once, -1 means no limit. Three restarts in "
            "a row without a batch always raise an error",
            at_least=-1,
        ),
    ] = 3
    remote_configs: Annotated[
        Configs,
        Option(
            "Ray's actor options (`num_cpus`, `num_gpus`, `memory`, `resources`, "
            "`scheduling_strategy`, `runtime_env`), or a list with one per actor; "
            "`num_cpus` defaults to the actor's number of workers"
        ),
    ] = None
    ray_init_config: Annotated[
        Mapping[str, Any] | None,
        Option("arguments of `ray.init`, if your script has not called it"),
    ] = None

    def __post_init__(self) -> None:
        """Check each value, and the combinations."""
        super().__post_init__()
        refuse(self, "RayCollector")
        refuse(self, f"RayCollector(sync={self.sync})")

    def configs(self, actors: int) -> list[dict[str, Any]]:
        """Return Ray's options for each actor.

        Raises:
            ValueError: if a list of them has another length.
        """
        chosen = {} if self.remote_configs is None else self.remote_configs
        cpus = self.num_workers_per_collector
        return [
            {"num_cpus": cpus, **config}
            for config in one_for_each("remote_configs", chosen, actors, "actors")
        ]

    def frames_of_workers(self, sizes: Sequence[int]) -> list[int]:
        """Return the frames per batch of each environment, by worker.

        Args:
            sizes: number of environments of each worker.
        """
        team = self.num_workers_per_collector
        starts = range(0, len(sizes), team)
        environments = [sum(sizes[start : start + team]) for start in starts]
        frames = self.frames_of(environments, together=self.sync)
        return [number for number in frames for _ in range(team)]
