"""Collectors, which iterate over batches of experience."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.collectors.multi import (
        MultiAsyncCollector as MultiAsyncCollector,
    )
    from marl_collect.collectors.multi import (
        MultiaSyncDataCollector as MultiaSyncDataCollector,
    )
    from marl_collect.collectors.multi import MultiCollector as MultiCollector
    from marl_collect.collectors.multi import (
        MultiSyncCollector as MultiSyncCollector,
    )
    from marl_collect.collectors.multi import (
        MultiSyncDataCollector as MultiSyncDataCollector,
    )
    from marl_collect.collectors.options import CollectorOptions as CollectorOptions
    from marl_collect.collectors.options import ExplorationType as ExplorationType
    from marl_collect.collectors.single import Collector as Collector
    from marl_collect.collectors.single import SyncDataCollector as SyncDataCollector

__getattr__, __dir__ = lazy.attach(__name__)
