"""Collectors: iterate over batches of experience.

========================  =====================================================
file                      its one job
========================  =====================================================
``options.py``            every option, declared once
``base.py``               what every collector offers
``backend.py``            what differs between them
``background.py``         collecting in a thread
``checkpoint.py``         a collector's state, to disk and back
``single.py``             ``Collector``: in this process; specifies the others
``multi_base.py``         what collectors with workers share
``multi_sync.py``         ``MultiSyncCollector``: all workers fill one batch
``multi_async.py``        ``MultiAsyncCollector``: first come, first served
``flights.py``            who is collecting, and how stale it may become
``driven.py``             a collector that something else drives, on another node
``starting.py``           from the user's arguments to a crew, for both
``crew.py``               the trainer's side of the workers
``moving.py``             batches to another device, in one copy
``figures.py``            what became of them, for ``stats()``
``worker.py``             what runs in a worker
``messages.py``           what crosses the sockets between the two
``trainer_policy.py``     the policy as the trainer holds it
``assigning.py``          what a collector and its workers begin with
``broadcaster.py``        counts the versions of the weights, and publishes them
``shared_weights.py``     how policy and weights get to workers of this machine
``batches.py``            one filled slot, and the TensorDict on its memory
``delivery.py``           from filled slots to what the user asked for
``statistics.py``         what is counted
========================  =====================================================
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.collectors.multi_async import (
        MultiAsyncCollector as MultiAsyncCollector,
    )
    from marl_collect.collectors.multi_async import (
        MultiaSyncDataCollector as MultiaSyncDataCollector,
    )
    from marl_collect.collectors.multi_async import MultiCollector as MultiCollector
    from marl_collect.collectors.multi_sync import (
        MultiSyncCollector as MultiSyncCollector,
    )
    from marl_collect.collectors.multi_sync import (
        MultiSyncDataCollector as MultiSyncDataCollector,
    )
    from marl_collect.collectors.options import CollectorOptions as CollectorOptions
    from marl_collect.collectors.options import ExplorationType as ExplorationType
    from marl_collect.collectors.single import Collector as Collector
    from marl_collect.collectors.single import SyncDataCollector as SyncDataCollector

__getattr__, __dir__ = lazy.attach(__name__)
