"""A batch is moved to another device in one copy, and is then independent."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.buffers.compact_observations import restore_next
from marl_collect.core.host_copies import moved as moved_to

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


def memories(batch: Any) -> set[int]:
    leaves = batch.values(include_nested=True, leaves_only=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize(
    "options", [{}, {"compact_obs": True}, {"split_trajs": True}], ids=str
)
def test_a_moved_batch_is_independent_and_one_copy_of_a_slot(
    options: dict[str, Any],
) -> None:
    """The CPU represents the other device."""
    whole = restore_next if "compact_obs" in options else TensorDict.copy
    with Collector(
        [CountingEnv] * 2, frames_per_batch=40, seed=0, **options
    ) as collector:
        batch: Any = collector.next()
        moved = moved_to(batch, torch.device("cpu"))
        assert moved.names == batch.names
        assert moved["prey"].batch_size == batch["prey"].batch_size
        expected = whole(batch.clone())
        if "split_trajs" not in options:  # These are in several memories.
            assert len(memories(moved)) == 1
            batch.zero_()
        assert (whole(moved) == expected).all()


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
