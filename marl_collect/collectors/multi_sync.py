"""``MultiSyncCollector``: all workers fill one batch with the same weights."""

from typing import final

from marl_collect.collectors.multi_base import MultiCollectorBase, WorkersBackend
from marl_collect.collectors.options import CollectorArguments
from marl_collect.collectors.workers import start_workers
from marl_collect.options import method, refuse


@final
class MultiSyncCollector(MultiCollectorBase):
    """Collects in worker processes; every batch has frames of all workers.

    Row ``b`` of a batch ``[B, T]`` is environment ``b``, worker by worker. The whole
    batch is collected with one version of the weights. The trainer copies nothing: it
    reads the memory that the workers wrote.

    The arguments are the fields of ``CollectorArguments``.
    """

    @method(CollectorArguments)
    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        refuse(parsed, "MultiSyncCollector")
        workers = start_workers(parsed.create_env_fn, parsed.policy, parsed)
        frames = parsed.frames_of(workers.sizes)
        self._open(parsed, WorkersBackend(workers, parsed, frames))


MultiSyncDataCollector = MultiSyncCollector
"""TorchRL's older name."""
