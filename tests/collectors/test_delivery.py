"""Delivery of batches: shapes, whole trajectories, copies."""

from typing import Any

import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector


def test_cat_results_shapes() -> None:
    def shape(envs: int, cat_results: Any) -> torch.Size:
        with MultiSyncCollector(
            CountingEnv,
            num_workers=2,
            envs_per_worker=envs,
            frames_per_batch=12,
            cat_results=cat_results,
        ) as collector:
            return collector.next().shape

    assert shape(1, None) == (2, 6)
    assert shape(1, "stack") == (2, 6)
    assert shape(1, 0) == (12,)
    assert shape(1, -1) == (12,)
    assert shape(3, None) == (6, 2)
    assert shape(3, "stack") == (2, 3, 2)
    assert shape(3, 0) == (6, 2)
    assert shape(3, -1) == (3, 4)


def test_copies_occupy_no_slot() -> None:
    collector = MultiSyncCollector(
        CountingEnv, frames_per_batch=8, total_frames=80, use_buffers=False
    )
    batches = list(collector)
    assert len({batch["done"].data_ptr() for batch in batches}) == 10
    assert collector.stats()["slots"] == 2


def test_postproc_gets_the_delivered_batch() -> None:
    def mark(batch: TensorDictBase) -> TensorDictBase:
        return batch.set("marked", torch.ones(batch.shape))

    for batch in Collector(
        CountingEnv, frames_per_batch=8, total_frames=16, postproc=mark
    ):
        assert (batch["marked"] == 1).all()
