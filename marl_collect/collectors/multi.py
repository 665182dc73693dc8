"""``MultiSyncCollector`` and ``MultiAsyncCollector``: collect in worker processes."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, final

from marl_collect.collectors.collector import CollectorBase
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.teams import Teams
from marl_collect.collectors.trainer_policy import chosen_policy
from marl_collect.collectors.workers import Workers
from marl_collect.options import Option, function, method, refuse, values


class _MultiCollector(CollectorBase):
    """A collector whose environments run in worker processes."""

    _workers: Workers

    def _start(self, parsed: CollectorOptions, team: int | None = None) -> None:
        """Start workers, of which ``team`` fill a batch together; None: all of them."""
        refuse(parsed, type(self).__name__)
        workers = self._workers = start_workers(parsed)
        frames = parsed.frames_of(workers.sizes, together=team is None)
        self._open(parsed, Teams(workers, parsed, frames, team))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._workers.pids


@final
class MultiSyncCollector(_MultiCollector):
    """Collects in worker processes; every batch has frames of all workers.

    Row ``b`` of a batch ``[B, T]`` is environment ``b``, worker by worker. The whole
    batch is collected with one version of the weights. The trainer copies nothing: it
    reads the memory that the workers wrote.

    The arguments are the fields of ``CollectorOptions``.
    """

    @method(CollectorOptions)
    def __init__(self, parsed: CollectorOptions) -> None:
        """Start the workers and wait until all of them are ready."""
        self._start(parsed)


@final
class MultiAsyncCollector(_MultiCollector):
    """Collects in worker processes; every batch is from one worker.

    A batch ``[B, T]`` has the B environments of its worker and ``frames_per_batch``
    frames (or the worker's entry, if that is a list). When its batch is delivered, a
    worker starts the next one with the newest weights. No rollout is copied or dropped.
    Workers that are ready at the same time are served in turn. The weights of a batch
    may be older than the last published ones; see ``max_staleness``.

    The arguments are the fields of ``CollectorOptions``.
    """

    @method(CollectorOptions)
    def __init__(self, parsed: CollectorOptions) -> None:
        """Start the workers and wait until all of them are ready."""
        self._start(parsed, team=1)


@dataclass(frozen=True)
class MultiArguments(CollectorOptions):
    """The arguments of ``MultiCollector``."""

    _: KW_ONLY
    sync: Annotated[bool, Option("whether all workers fill one batch together")]


@function(MultiArguments)
def MultiCollector(  # noqa: N802 - TorchRL's name
    parsed: MultiArguments,
) -> MultiSyncCollector | MultiAsyncCollector:
    """Return a MultiSyncCollector if ``sync``, otherwise a MultiAsyncCollector."""
    chosen = MultiSyncCollector if parsed.sync else MultiAsyncCollector
    return chosen(**values(CollectorOptions, parsed))


def start_workers(
    options: CollectorOptions,
    first_seeds: Callable[[int], Sequence[int]] | None = None,
) -> Workers:
    """Check the arguments and start the workers; see ``Workers``."""
    policy = chosen_policy(options.policy, options)
    factories = options.factories(options.create_env_fn)
    if not isinstance(options.frames_per_batch, int):
        options.frames_of(list(map(len, factories)))
    return Workers(factories, policy, options, first_seeds)


MultiSyncDataCollector = MultiSyncCollector
"""TorchRL's older name."""
MultiaSyncDataCollector = MultiAsyncCollector
"""TorchRL's older name."""
