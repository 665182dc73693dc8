"""Delivery of batches: shapes, whole trajectories, copies."""

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


@pytest.mark.torchrl_defect("D1")
@pytest.mark.parametrize("kind", KINDS)
def test_split_trajs_pads_to_the_longest(kind: Any) -> None:
    collector = kind(
        [CountingEnv] * 2, frames_per_batch=60, total_frames=120, split_trajs=True
    )
    frames = 0
    for batch in collector:
        mask = batch["collector", "mask"]
        assert batch.shape == mask.shape
        assert mask.shape[1] == mask.sum(1).max()
        frames += int(mask.sum())
        ids = batch["collector", "traj_ids"]
        for row, valid in zip(ids, mask, strict=True):
            assert row[valid].unique().numel() == 1
        assert (batch["hunter", "observation"][~mask] == 0).all()
    assert frames == 120


@pytest.mark.torchrl_defect("D1")
@pytest.mark.parametrize("form", ["padded", "cat"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_whole_trajectories_only(kind: Any, form: str) -> None:
    collector = kind(
        [CountingEnv] * 2,
        frames_per_batch=20,
        total_frames=200,
        trajs_per_batch=3,
        traj_format=form,
        seed=0,
    )
    traj_ids: list[int] = []
    for batch in collector:
        if form == "padded":
            rows = [
                row[valid]
                for row, valid in zip(batch, batch["collector", "mask"], strict=True)
            ]
        else:
            ids = batch["collector", "traj_ids"]
            _, counts = torch.unique_consecutive(ids, return_counts=True)
            rows = list(batch.split(counts.tolist()))
        assert len(rows) <= 3
        for row in rows:
            assert row["hunter", "observation"][0, 0, 1] == 0, "does not begin"
            assert row["next", "done"][-1].all(), "does not end"
            assert not row["next", "done"][:-1].any()
            traj_ids.append(int(row["collector", "traj_ids"][0]))
    assert len(traj_ids) == len(set(traj_ids)) >= 10


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Collector, {"split_trajs": True, "frames_per_batch": 60}),
        (Collector, {"trajs_per_batch": 3, "frames_per_batch": 60}),
        (MultiSyncCollector, {"frames_per_batch": [40, 14]}),
        (MultiSyncCollector, {"frames_per_batch": [40, 14], "split_trajs": True}),
    ],
)
def test_no_padding_goes_into_a_replay_buffer(
    kind: Any, options: dict[str, Any]
) -> None:
    """Each stored frame was played, and each played frame is stored once."""
    stored: list[TensorDictBase] = []

    class Buffer:
        def extend(self, frames: TensorDictBase) -> None:
            stored.append(frames.clone())

    shared = {"seed": 5, "max_frames_per_traj": 9, **options}
    total = 10 * 54
    with kind([CountingEnv] * 2, total_frames=total, **shared) as collector:
        padded = [batch.clone() for batch in collector]
    with kind(
        [CountingEnv] * 2, total_frames=total, replay_buffer=Buffer(), **shared
    ) as collector:
        assert all(batch is None for batch in collector)
    valid = [batch.reshape(-1) for batch in padded]
    if any(("collector", "mask") in batch.keys(True) for batch in padded):
        assert not all(batch["collector", "mask"].all() for batch in padded)
        valid = [batch[batch["collector", "mask"]] for batch in valid]
    for frames in stored:
        assert frames.ndim == 1
        # Every agent observes the steps since the reset, except if it is dead.
        steps = frames["hunter", "observation"][..., 1].amax(-1)
        alive = frames["hunter", "mask"].any(-1)
        assert (steps[alive] == frames["step_count"].squeeze(-1)[alive]).all()
        assert (frames["collector", "traj_ids"] >= 0).all()
        # An hunter has its number in every observation, but padding is zero.
        assert (frames["next", "step_count"] > 0).all()
    numbers = [
        torch.cat(
            [
                frames["collector", "traj_ids"] * 100 + frames["step_count"][..., 0]
                for frames in batches
            ]
        )
        for batches in (stored, valid)
    ]
    assert len(numbers[0].unique()) == len(numbers[0])
    assert torch.equal(*(n.sort().values for n in numbers))
