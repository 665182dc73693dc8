"""Sync collection on Ray: the data of a MultiSyncCollector, and the same offers."""

from collections.abc import Iterator
from typing import Any

import pytest

from marl_collect import MultiSyncCollector, RayCollector

pytest.importorskip("ray")

from ray_tools import biased, local_ray, masked


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with local_ray() as module:
        yield module


SHARED = {
    "frames_per_batch": 60,
    "max_frames_per_traj": 9,
    "track_policy_version": True,
    "seed": 3,
}


@pytest.fixture(scope="module")
def pair(ray: Any) -> Iterator[RayCollector]:
    """Two actors with two environments each, whose policy has a weight."""
    with RayCollector(
        masked,
        biased(),
        num_collectors=2,
        envs_per_worker=2,
        sync=True,
        **SHARED,
    ) as collector:
        yield collector


def test_a_batch_is_what_local_workers_give(pair: RayCollector) -> None:
    with MultiSyncCollector(
        masked, biased(), num_workers=2, envs_per_worker=2, **SHARED
    ) as local:
        for weight in (0.0, 1.0, 2.0):
            expected, found = local.next(), pair.next()
            assert set(found.keys(True, True)) == set(expected.keys(True, True))
            assert found.batch_size == expected.batch_size
            assert found.names == expected.names
            assert (found == expected).all()
            assert (found["hunter", "bias"] == weight).all()
            for collector in (local, pair):
                collector.policy.module.bias.add_(1)
                collector.update_policy_weights_()
    counted, there = local.stats(), pair.stats()
    for name in ("frames", "batches", "episodes", "episode_returns", "policy_version"):
        assert there[name] == counted[name]
