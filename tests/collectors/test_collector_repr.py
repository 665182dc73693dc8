"""``repr`` of collectors: size, version and progress, from local state."""

from typing import Any

import pytest
from support.internals import pool_of
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.collectors.arguments import sized_workers

FACTORIES = [CountingEnv] * 4


@pytest.mark.parametrize(
    ("kind", "options", "outline"),
    [
        (Collector, {}, "4 environments, [4, 10]"),
        (MultiSyncCollector, {"num_workers": 2}, "2 workers x 2 environments, [4, 10]"),
        (
            MultiAsyncCollector,
            {"num_workers": 2},
            "2 workers x 2 environments, [2, 20]",
        ),
        (MultiSyncCollector, {}, "4 workers x 1 environment, [4, 10]"),
    ],
)
def test_the_repr_has_size_version_and_frames(
    kind: Any, options: dict[str, Any], outline: str
) -> None:
    with kind(FACTORIES, frames_per_batch=40, seed=0, **options) as collector:
        name = kind.__name__
        assert repr(collector) == f"{name}({outline}, version 0, 0 frames)"
        for _ in range(30):
            collector.next()
        after = f"{name}({outline}, version 0, 1,200 frames"
        assert repr(collector) == f"{after})"
    assert repr(collector) == f"{after}, closed)"


def test_the_repr_has_the_version_of_the_last_update() -> None:
    with Collector(CountingEnv, frames_per_batch=5) as collector:
        collector.load_state_dict(collector.state_dict() | {"policy_version": 12})
        assert "1 environment, [1, 5], version 12, 0 frames" in repr(collector)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
def test_a_collector_that_was_not_started_has_a_repr(kind: Any) -> None:
    assert repr(kind.__new__(kind)) == f"{kind.__name__}(not started)"


def test_the_repr_does_not_contact_workers() -> None:
    with MultiSyncCollector(FACTORIES, frames_per_batch=40, num_workers=2) as collector:
        pool_of(collector).close(1.0)
        assert repr(collector).startswith("MultiSyncCollector(2 workers x 2 ")


def test_workers_of_different_sizes_are_summed() -> None:
    assert sized_workers([1, 3]) == "2 workers, 4 environments"
