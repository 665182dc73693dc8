"""Frames go into a replay buffer, from the iterator or from a thread."""

import statistics
import time
from typing import Any

import pytest
from support.processes import wait_until
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]


def filling(**options: Any) -> MultiSyncCollector:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000))
    return MultiSyncCollector(CountingEnv, replay_buffer=buffer, **options)


def test_started_collector_fills_the_buffer_until_paused() -> None:
    collector = filling(frames_per_batch=20)
    with (
        Collector(CountingEnv, frames_per_batch=8) as other,
        pytest.raises(RuntimeError, match="replay_buffer"),
    ):
        other.start()
    collector.start()
    wait_until(lambda: collector.getattr_rb("write_count") >= 100)
    with collector.pause():
        before = collector.getattr_rb("write_count")
        time.sleep(0.1)  # noqa: TID251 - nothing must happen in this time
        assert collector.getattr_rb("write_count") == before >= 100
    assert collector.is_running()
    collector.async_shutdown()
    assert not collector.is_running()


def test_calls_to_a_started_collector_wait_for_the_current_batch() -> None:
    """The thread must not take the lock again at once."""
    collector = filling(frames_per_batch=8)
    collector.start()
    waited = []
    for _ in range(25):
        frames = collector.frames
        # The thread must get the lock again.
        wait_until(lambda frames=frames: collector.frames != frames)  # type: ignore[misc]
        before = collector.frames
        waited.append(collector.state_dict()["frames"] - before)
    collector.async_shutdown()
    assert statistics.median(waited) <= 16, waited


def test_a_postproc_may_call_its_collector() -> None:
    def postproc(batch: Any) -> Any:
        assert collector.getattr_env("is_closed") is not None
        return batch

    collector = filling(frames_per_batch=8, total_frames=80, postproc=postproc)
    collector.start()
    wait_until(lambda: not collector.is_running())
    assert collector.frames == 80
    collector.async_shutdown()


def test_an_error_while_delivering_a_remaining_trajectory_is_raised() -> None:
    """Two trajectories end in one slot: the second is delivered without a third."""
    calls = 0

    def postproc(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ArithmeticError("the second one")
        return batch

    limits = {"frames_per_batch": 20, "max_frames_per_traj": 5, "trajs_per_batch": 1}
    collector = filling(postproc=postproc, **limits)
    collector.start()
    wait_until(lambda: not collector.is_running())
    with pytest.raises(ArithmeticError, match="the second"):
        collector.async_shutdown()
