"""``MultiAsyncCollector``: yields batches of single workers as they arrive."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, final

from marl_collect.collectors.multi_base import MultiCollectorBase, WorkersBackend
from marl_collect.collectors.multi_sync import MultiSyncCollector
from marl_collect.collectors.options import CollectorArguments
from marl_collect.collectors.workers import start_workers
from marl_collect.options import Option, function, method, refuse, values


@final
class MultiAsyncCollector(MultiCollectorBase):
    """Collects in worker processes; every batch is from one worker.

    A batch ``[B, T]`` has the B environments of its worker and ``frames_per_batch``
    frames (or the worker's entry, if that is a list). When its batch is delivered, a
    worker starts the next one with the newest weights. No rollout is copied or dropped.
    Workers that are ready at the same time are served in turn. The weights of a batch
    may be older than the last published ones; see ``max_staleness``.

    The arguments are the fields of ``CollectorArguments``.
    """

    @method(CollectorArguments)
    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        refuse(parsed, "MultiAsyncCollector")
        workers = start_workers(parsed.create_env_fn, parsed.policy, parsed)
        frames = parsed.own_frames_of(workers.sizes)
        self._open(parsed, WorkersBackend(workers, parsed, frames, team=1))


@dataclass(frozen=True)
class MultiArguments(CollectorArguments):
    """The arguments of ``MultiCollector``."""

    _: KW_ONLY
    sync: Annotated[bool, Option("whether all workers fill one batch together")]


@function(MultiArguments)
def MultiCollector(  # noqa: N802 - TorchRL's name
    parsed: MultiArguments,
) -> MultiSyncCollector | MultiAsyncCollector:
    """Return a MultiSyncCollector if ``sync``, otherwise a MultiAsyncCollector."""
    kind = MultiSyncCollector if parsed.sync else MultiAsyncCollector
    return kind(**values(CollectorArguments, parsed))


MultiaSyncDataCollector = MultiAsyncCollector
"""TorchRL's older name."""
