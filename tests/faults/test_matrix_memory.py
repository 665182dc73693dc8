"""Rows of the fault matrix about memory: a small /dev/shm, and workers that grow."""

import logging
from typing import Any

import pytest
import torch
from support.scripts import run_mounted
from workloads.counting import CountingEnv, Fault

from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.models import make_policy
from marl_collect.processes.worker_handle import resident_bytes

MIB = 1 << 20
LEAK = 2 * MIB  # Per step.
ROOM = 50 * LEAK  # Above what a healthy worker takes, which varies by some MiB.

SMALL = """
import os
from functools import partial
from marl_collect import MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from workloads.counting import CountingEnv

files = os.statvfs("/dev/shm")
assert files.f_bavail * files.f_frsize <= 1 << 20
factory = partial(CountingEnv, image=(64, 64, 3))

def collect(kind):
    with kind([factory] * 2, frames_per_batch=400) as collector:
        return collector.next().clone()

def step():
    with ParallelEnv(64, factory, num_processes=2) as env:
        return env.rollout(4)

def check(name, data):
    image = data["hunter", "observation", "image"]
    assert image.numel() > 1 << 20, image.shape
    assert image.float().std() > 0
    print(name)

check("sync", collect(MultiSyncCollector))
check("async", collect(MultiAsyncCollector))
check("env", step())
"""


@pytest.mark.mounts
@pytest.mark.timeout(300)  # Three interpreters import torch, one after the other.
def test_a_small_dev_shm_does_not_matter() -> None:
    """Row 11: /dev/shm has 1 MiB, and shared memory takes more."""
    process = run_mounted("/dev/shm", SMALL, mebibytes=1, timeout=250)
    assert process.stdout.split() == ["sync", "async", "env"], process.stderr


_LEAKED: list[bytearray] = []


def leak() -> None:
    """Allocate some more memory and write to it, so it is resident."""
    _LEAKED.append(bytearray(b"x") * LEAK)


def leaky() -> CountingEnv:
    return CountingEnv(fault=Fault(leak, "step", repeat=True))


def run(kind: Any, factory: Any, limit: int | None, **options: Any) -> Any:
    policy = make_policy(CountingEnv(), num_cells=(4,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in policy.parameters():
            torch.nn.init.normal_(parameter)
    with kind(
        [factory] * 2,
        policy,
        frames_per_batch=40,
        seed=0,
        max_worker_rss=limit,
        track_policy_version=True,
        **options,
    ) as collector:
        rows: dict[int, list[Any]] = {0: [], 1: []}
        largest = 0
        while min(map(len, rows.values())) < 6:
            for row in collector.next().clone():
                environment = int(row["collector", "traj_ids"][0]) >> 32
                rows[environment].append(row)
            for pid in collector.worker_pids:
                largest = max(largest, resident_bytes(pid))
            collector.update_policy_weights_()
        return rows, collector.stats(), largest


MODES = [
    (MultiSyncCollector, {}),
    (MultiSyncCollector, {"prefetch": True}),
    (MultiAsyncCollector, {}),
]


@pytest.mark.parametrize(("kind", "options"), MODES, ids=["sync", "prefetch", "async"])
def test_a_worker_that_grows_is_replaced_without_changing_the_data(
    kind: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Row 35: each step leaks, and some batches reach the limit."""
    expected, stats, normal = run(kind, CountingEnv, None, **options)
    assert stats["recycled"] == 0
    assert caplog.messages == []
    caplog.set_level(logging.INFO, "marl_collect")
    batch = 20 if kind is MultiSyncCollector else 40
    actual, stats, largest = run(kind, leaky, normal + ROOM, **options)
    assert stats["recycled"] >= 2
    assert len(caplog.messages) == stats["recycled"]
    text = "Worker {} exceeds max_worker_rss and is replaced."
    assert set(caplog.messages) <= {text.format(0), text.format(1)}
    assert stats["restarts"] == 0
    assert stats["cut_trajectories"] == []
    # Checked after a batch, and with an unfinished batch.
    assert largest < normal + ROOM + 3 * batch * LEAK
    for environment, rows in expected.items():
        for row, other in zip(rows[:6], actual[environment][:6], strict=True):
            versions = ("policy_version", ("next", "policy_version"))
            apart = versions if kind is MultiAsyncCollector else ()
            assert (row.exclude(*apart) == other.exclude(*apart)).all()
