"""TorchRL's attributes and methods of collectors: the same, or a way here."""

from typing import Any

import pytest
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.collectors import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    SyncDataCollector,
)


def collector(kind: Any = Collector, **options: Any) -> Any:
    return kind([CountingEnv] * 2, **{"frames_per_batch": 10, **options})


def test_a_collector_tells_its_size_and_whether_it_is_complete() -> None:
    with collector(total_frames=20) as limited:
        assert limited.total_frames == 20
        assert limited.requested_frames_per_batch == 10
        for expected in (False, True):
            limited.next()
            stats = limited.stats()
            assert stats["total_frames"] == 20
            assert stats["requested_frames_per_batch"] == 10
            assert stats["completed"] is expected
    with collector() as endless:
        assert endless.total_frames == -1
        assert "completed" not in endless.stats()


def test_torchrls_older_names() -> None:
    assert SyncDataCollector is Collector
    assert MultiSyncDataCollector is MultiSyncCollector
    assert MultiaSyncDataCollector is MultiAsyncCollector


def test_set_seed_and_shutdown_take_torchrls_arguments() -> None:
    first = collector()
    assert first.set_seed(3, True) == 3
    with pytest.raises(ValueError, match="close_env=False is not possible"):
        first.shutdown(close_env=False)
    first.shutdown(None, close_env=True)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(
    ("name", "advice"),
    [("map_fn", "getattr_env"), ("get_policy_version", "use policy_version")],
)
def test_a_method_without_a_place_here_names_the_way(
    kind: Any, name: str, advice: str
) -> None:
    with (
        collector(kind) as running,
        pytest.raises(
            AttributeError, match=rf"{kind.__name__} has no {name}: .*{advice}"
        ),
    ):
        getattr(running, name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"track_policy_version": True, "max_frames_per_traj": 3},
        {"cat_results": "stack", "envs_per_worker": 2, "frames_per_batch": 40},
        {"cat_results": 0},
        {"cat_results": -1, "envs_per_worker": 2, "frames_per_batch": 40},
    ],
    ids=str,
)
def test_a_fake_batch_has_the_keys_shapes_and_dtypes_of_a_batch(
    options: dict[str, Any],
) -> None:
    kind = MultiSyncCollector if "cat_results" in options else Collector
    with collector(kind, **options) as running:
        fake, batch = running.fake_tensordict(), running.next()
    assert fake.shape == batch.shape
    assert fake.names == batch.names == [*[None] * (batch.ndim - 1), "time"]
    keys = set(batch.keys(True, True))
    assert set(fake.keys(True, True)) == keys
    for key in keys:
        assert fake[key].dtype == batch[key].dtype
        assert fake[key].shape == batch[key].shape
        assert not fake[key].any()


def test_an_asynchronous_collector_has_no_fake_batch() -> None:
    with (
        collector(MultiAsyncCollector) as running,
        pytest.raises(NotImplementedError, match="next"),
    ):
        running.fake_tensordict()


def test_an_error_within_a_property_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collector() as running, monkeypatch.context() as patch:
        patch.delattr(running, "_source")
        with pytest.raises(AttributeError, match="no attribute '_source'"):
            _ = running.description
