"""A batch is moved to another device in one copy, and is then independent."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.buffers.compact_observations import restore_next
from marl_collect.core.host_copies import moved as moved_to

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


def memories(batch: Any) -> set[int]:
    leaves = batch.values(include_nested=True, leaves_only=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_batch_on_a_slot_is_moved_in_one_copy() -> None:
    """The CPU represents the other device."""
    with Collector([CountingEnv] * 2, frames_per_batch=20, seed=0) as collector:
        batch = collector.next()
        assert len(memories(batch)) == 1
        moved = moved_to(batch, torch.device("cpu"))
        assert len(memories(moved)) == 1
        assert memories(moved) != memories(batch)
        assert moved.names == batch.names
        assert moved["prey"].batch_size == batch["prey"].batch_size
        assert (moved == batch).all()
        before = moved.clone()
        batch.zero_()
        assert (moved == before).all()


def test_observations_of_compact_obs_are_moved_too() -> None:
    with Collector(
        [CountingEnv] * 2, frames_per_batch=40, seed=0, compact_obs=True
    ) as collector:
        batch = collector.next()
        moved = moved_to(batch, torch.device("cpu"))
        assert len(memories(moved)) == 1
        assert (restore_next(moved) == restore_next(batch)).all()


def test_a_batch_in_several_memories_is_moved() -> None:
    with Collector(
        [CountingEnv] * 2, frames_per_batch=40, seed=0, split_trajs=True
    ) as collector:
        batch = collector.next()
        assert len(memories(batch)) > 1
        assert (moved_to(batch, torch.device("cpu")) == batch).all()


def test_a_batch_can_be_moved_to_the_meta_device() -> None:
    with Collector(CountingEnv, frames_per_batch=10) as collector:
        batch = collector.next()
        moved = moved_to(batch, torch.device("meta"))
    assert moved.device == torch.device("meta")
    for key in batch.keys(include_nested=True, leaves_only=True):
        assert moved[key].is_meta
        assert moved[key].shape == batch[key].shape
        assert moved[key].dtype == batch[key].dtype


@pytest.mark.accelerator
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"no_cuda_sync": True}, {"split_trajs": True}])
def test_batches_are_stored_on_a_gpu(kind: Any, options: dict[str, Any]) -> None:
    def collect(**overrides: Any) -> Iterator[Any]:
        with kind(
            CountingEnv,
            num_workers=1,
            frames_per_batch=40,
            seed=0,
            **options,
            **overrides,
        ) as collector:
            for _ in range(4):
                yield collector.next()

    expected = [batch.clone() for batch in collect()]
    # Their memory is their own, so they need no clones.
    stored = list(collect(storing_device="cuda"))
    torch.cuda.synchronize()
    for moved, batch in zip(stored, expected, strict=True):
        assert moved.device == torch.device("cuda", torch.cuda.current_device())
        assert (moved.cpu() == batch).all()


@pytest.mark.accelerator
def test_policies_and_batches_are_on_the_requested_devices() -> None:
    from marl_collect.models import make_policy

    policy = make_policy(CountingEnv(), num_cells=(4,), device="meta")
    with MultiSyncCollector(
        [CountingEnv] * 2,
        policy,
        frames_per_batch=20,
        policy_device=["cpu", "cuda"],
        storing_device="cuda",
        track_policy_version=True,
    ) as collector:
        for k in range(3):
            batch = collector.next()
            assert batch.device is not None
            assert batch.device.type == "cuda"
            assert (batch["policy_version"] == k).all()
            collector.policy.cuda()
            collector.update_policy_weights_()
