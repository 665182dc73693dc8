"""Collectors: iterate over batches of experience.

========================  =====================================================
file                      its one job
========================  =====================================================
``options.py``            every option, checked before anything starts
``base.py``               what every collector offers
``single.py``             ``Collector``: in this process; specifies the others
``multi_sync.py``         ``MultiSyncCollector``: all workers fill one batch
``crew.py``               the trainer's side of the workers
``worker.py``             what runs in a worker
``messages.py``           what crosses the sockets between the two
``trainer_policy.py``     the policy as the trainer holds it
``batches.py``            from a filled slot to a batch
``statistics.py``         what is counted
========================  =====================================================
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_collect.collectors.multi_sync import MultiSyncCollector
    from marl_collect.collectors.options import CollectorOptions, ExplorationType
    from marl_collect.collectors.single import Collector

    MultiSyncDataCollector = MultiSyncCollector
    SyncDataCollector = Collector

_NAMES = {
    "Collector": ("single", "Collector"),
    "CollectorOptions": ("options", "CollectorOptions"),
    "ExplorationType": ("options", "ExplorationType"),
    "MultiSyncCollector": ("multi_sync", "MultiSyncCollector"),
    "MultiSyncDataCollector": ("multi_sync", "MultiSyncCollector"),
    "SyncDataCollector": ("single", "Collector"),
}

__all__ = [
    "Collector",
    "CollectorOptions",
    "ExplorationType",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "SyncDataCollector",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
