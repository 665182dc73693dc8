"""Slots that only a while was short of are freed; a steady loop allocates nothing."""

import gc
import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import psutil
import pytest
from hypothesis import given
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.buffers.layout import Layout
from marl_collect.buffers.slots import Slots
from marl_collect.core.description import Field
from marl_collect.processes.shared_memory import Segment

MANY = 200
"""More batches than any slot is kept for without need."""
LAYOUT = Layout.plan({("x",): Field((), np.dtype(np.int64))}, (2, 3))

pytestmark = pytest.mark.filterwarnings("ignore:More than . batches are held")


class Loop:
    """Fills slots with the number of the batch, and holds the batches."""

    def __init__(self, prepared: int = 2) -> None:
        self.slots = Slots(LAYOUT, prepared, shared=False)
        self.held: list[tuple[int, Any]] = []
        self.filled = 0

    def collect(self) -> None:
        slot = self.slots.acquire()
        self.filled += 1
        self.slots.layout.arrays(self.slots.segment(slot).buffer)["x",].fill(
            self.filled
        )
        self.held.append((self.filled, self.slots.hand_out(slot)["x",]))
        for number, batch in self.held:
            assert (batch == number).all()  # No held batch is overwritten.

    def drop(self, left: int) -> None:
        del self.held[: len(self.held) - left]


def test_no_code_of_python_runs_when_a_batch_is_dropped() -> None:
    """A Ctrl-C during it would be ignored."""
    loop = Loop()
    loop.collect()
    events: list[str] = []
    sys.setprofile(lambda *call: events.append(call[1]))
    loop.held.clear()
    sys.setprofile(None)
    assert "call" not in events
    assert len({loop.slots.acquire() for _ in range(2)}) == len(loop.slots)


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of every memory that is reserved."""
    sizes: list[int] = []
    ordinary = Segment.ordinary

    def recording(nbytes: int, what: str, hint: str = "") -> Segment:
        sizes.append(nbytes)
        return ordinary(nbytes, what, hint)

    monkeypatch.setattr(Segment, "ordinary", recording)
    return sizes


def test_slots_that_were_needed_once_are_freed() -> None:
    loop = Loop()
    for _ in range(6):
        loop.collect()
    assert len(loop.slots) == 6
    for _ in range(MANY):
        loop.drop(1)
        loop.collect()
    assert len(loop.slots) == 2
    for _ in range(6):
        loop.collect()
    assert len(loop.slots) == 8  # A batch that is held needs a slot again.


@pytest.mark.parametrize("held", [0, 1, 2, 5])
def test_a_loop_that_always_holds_batches_allocates_nothing(
    held: int, reserved: list[int]
) -> None:
    loop = Loop()
    for _ in range(8):
        loop.drop(held)
        loop.collect()
    before = len(reserved)
    for _ in range(3 * MANY):
        loop.drop(held)
        loop.collect()
    assert len(reserved) == before


@pytest.mark.parametrize("count", [4, 12, 70])
def test_a_loop_that_drops_many_batches_at_once_allocates_nothing(
    count: int, reserved: list[int]
) -> None:
    loop = Loop()
    for _ in range(count):
        loop.collect()
    for _ in range(12):
        loop.drop(0)
        for _ in range(count):
            loop.collect()
    assert len(reserved) == len(loop.slots) == count


@given(st.integers(1, 3), st.lists(st.integers(0, 5), max_size=30), st.data())
def test_no_slot_is_lost_or_given_twice(
    prepared: int, keep: list[int], data: st.DataObject
) -> None:
    loop = Loop(prepared)
    for left in keep:
        for _ in range(data.draw(st.sampled_from([1, 1, 2, 40]))):
            loop.drop(left)
            loop.collect()
    loop.drop(0)
    slots = loop.slots
    count = len(slots)
    assert count >= prepared
    taken = [slots.acquire() for _ in range(count)]
    assert len(set(taken)) == count
    assert not set(taken) & set(slots.vacant)
    assert len(slots) == count


def test_a_slot_is_not_lost_when_memory_is_short_after_a_fork() -> None:
    loop = Loop(prepared=1)
    loop.collect()
    loop.slots.keep_held()  # As before a fork.
    loop.drop(0)

    def short(nbytes: int, what: str, hint: str = "") -> Segment:
        raise MemoryError(f"{what} needs {nbytes} bytes. {hint}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "ordinary", short)
        with pytest.raises(MemoryError):
            loop.slots.acquire()
    loop.collect()
    assert len(loop.slots) == 1


def mapped(pid: int) -> int:
    """Return the number of shared memories that a process maps."""
    files = [m.path for m in psutil.Process(pid).memory_maps(grouped=False)]
    return sum("memfd:marl_collect" in path for path in files)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Collector, {}),
        (MultiSyncCollector, {}),
        (MultiSyncCollector, {"prefetch": True}),
        (MultiAsyncCollector, {}),
    ],
)
def test_workers_release_the_memory_too(kind: Any, options: dict[str, Any]) -> None:
    with kind([CountingEnv] * 2, frames_per_batch=8, **options) as collector:
        pids = getattr(collector, "worker_pids", ())

        def memories() -> list[int]:
            gc.collect()
            return [collector.stats()["slots"], *map(mapped, pids)]

        for _ in range(20):
            collector.next()
        before = memories()
        batches = [collector.next() for _ in range(9)]
        assert all(now > then for now, then in zip(memories(), before, strict=True))
        copies = [batch.clone() for batch in batches]
        assert all((a == b).all() for a, b in zip(batches, copies, strict=True))
        del batches
        for _ in range(MANY):
            collector.next()
        if kind is MultiAsyncCollector:  # A slow worker is told of fewer batches.
            for _ in range(20 * MANY):
                if all(
                    now <= then for now, then in zip(memories(), before, strict=True)
                ):
                    break
                collector.next()
            else:
                pytest.fail(f"{memories()} did not fall to {before}")
        else:
            assert memories() == before
        # A slot is used again under the number of one that was freed.
        batches = [collector.next() for _ in range(9)]
        ids = [int(b["collector", "traj_ids"].flatten()[0]) for b in batches]
        assert -1 not in ids
