"""Workers that are replaced: with ``on_worker_failure="restart"``, and large ones."""

import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_tools import KINDS, faulty_once, kill, next_from
from support.clocks import LIMIT, Clock, hangs_in_c
from support.processes import wait_until_gone
from support.scripts import run_mounted, run_python
from workloads.counting import CountingEnv, Fault, stuck

from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.errors import WorkerError
from marl_collect.processes.worker_handle import resident_bytes

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", at=25),
        Fault("exit", at=25),
        Fault("raise", at=25),
        Fault("raise", "reset", at=2),
        Fault(stuck, at=25),
    ],
    ids=["kill", "exit", "raise", "raise in reset", "hang"],
)
def test_a_worker_that_fails_is_replaced(
    kind: Any, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, clock = tmp_path / "hung", Clock(monkeypatch)
    harm = hangs_in_c(hung) if fault.kind is stuck else fault.kind
    factory = faulty_once(tmp_path / "failed", harm, fault.phase, at=fault.at)
    options = {"on_worker_failure": "restart", "seed": 0, "timeout": LIMIT}
    with kind([CountingEnv, factory], frames_per_batch=20, **options) as collector:
        pids = collector.worker_pids
        clock.runs_when = lambda: (
            hung.exists() and clock.quiet == {1} and collector.worker_pids == pids
        )
        last: dict[int, int] = {}
        while collector.stats()["restarts"] < 1 or collector.frames < 200:
            ids = collector.next()["collector", "traj_ids"]
            for row in ids.tolist():
                environment = row[0] >> 32
                assert {i >> 32 for i in row} == {environment}
                assert row == sorted(row)
                assert row[0] >= last.get(environment, 0), "a number came back"
                last[environment] = row[-1]
        stats = collector.stats()
        assert stats["restarts"] == 1
        assert all(cut_id >> 32 == 1 for cut_id in stats["cut_trajectories"])
        assert len(stats["cut_trajectories"]) == 1 or fault.phase == "reset"


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_a_restart_is_logged_and_can_be_silenced(
    level: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    factory = faulty_once(tmp_path / "failed", "raise", "step", at=25)
    options: Any = {"frames_per_batch": 20, "on_worker_failure": "restart"}
    log = logging.getLogger("marl_collect")
    request.addfinalizer(lambda: log.setLevel(logging.NOTSET))
    log.setLevel(level)
    with MultiSyncCollector([CountingEnv, factory], **options) as collector:
        while collector.stats()["restarts"] < 1:
            collector.next()
    assert len(caplog.messages) == (level == logging.NOTSET)
    for text in caplog.messages:
        assert text.startswith("Restarting: Worker 1 (pid ")
        assert "fault in step" in text
    assert capfd.readouterr().err == ""  # Only handlers of the user print.


@every_kind
def test_commands_succeed_after_a_worker_died(kind: Any) -> None:
    with kind(
        [CountingEnv] * 2, frames_per_batch=20, on_worker_failure="restart", seed=0
    ) as collector:
        for ask in (
            lambda: collector.getattr_env("is_closed"),
            collector.reset,
            lambda: collector.set_seed(7),
            collector.state_dict,
        ):
            collector.next()
            kill(collector.worker_pids[1])
            ask()
            for _ in range(2):  # The first may be of the process that was killed.
                next_from(collector, 1)
        assert collector.stats()["restarts"] == 4


def test_killing_the_fork_server_ends_or_restarts_the_workers() -> None:
    """All collectors of a process share one server, which takes long to start."""

    def server_of(collector: Any) -> int:
        return psutil.Process(collector.worker_pids[0]).ppid()

    def start(**options: Any) -> list[Any]:
        return [
            stack.enter_context(kind([CountingEnv] * 2, frames_per_batch=20, **options))
            for kind in KINDS
        ]

    with ExitStack() as stack:
        failing, restarting = start(), start(on_worker_failure="restart")
        for collector in (*failing, *restarting):
            collector.next()
        pids = [pid for c in (*failing, *restarting) for pid in c.worker_pids]
        (server,) = set(map(server_of, (*failing, *restarting)))
        os.kill(server, signal.SIGKILL)
        wait_until_gone([server, *pids])
        for collector in failing:
            with pytest.raises(WorkerError, match="fork server"):  # noqa: PT012
                for _ in range(4):
                    collector.next()
        for collector in restarting:
            while collector.stats()["restarts"] < 2:
                collector.next()
            assert server_of(collector) != server


LEAKS = """
import os, signal
import torch
from fault_tools import KINDS, next_from
from marl_collect.models import make_policy
from support.processes import gone, wait_until_gone
from workloads.counting import CountingEnv

def descriptors():
    return len(os.listdir("/proc/self/fd"))

options = {"frames_per_batch": 20, "on_worker_failure": "restart"}
for kind in KINDS:
    policy = make_policy(CountingEnv, num_cells=(100, 100))
    with kind([CountingEnv] * 2, policy, **options) as collector:
        for k in range(6):
            next_from(collector, k % 2)
        files = descriptors()
        for k in range(6):
            pid = collector.worker_pids[k % 2]
            os.kill(pid, signal.SIGKILL)
            wait_until_gone([pid])
            while collector.stats()["restarts"] == k:
                assert torch.isfinite(collector.next()["hunter", "logits"]).all()
            next_from(collector, k % 2)
        print(files, descriptors())
        pids = collector.worker_pids
    assert all(map(gone, pids))
"""


def test_restarts_leak_nothing() -> None:
    """Sync and async; in a process that has no other open files."""
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = run_python("-c", LEAKS, env={**os.environ, "PYTHONPATH": folders})
    counts = [int(count) for count in process.stdout.split()]
    assert len(counts) == 4, process.stderr
    for before, after in zip(counts[::2], counts[1::2], strict=True):
        assert after <= before + 2


# Memory: a small /dev/shm, and workers that grow


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
def test_a_small_dev_shm_does_not_matter() -> None:
    """Row 11: /dev/shm has 1 MiB, and shared memory takes more."""
    process = run_mounted("/dev/shm", SMALL, mebibytes=1)
    assert process.stdout.split() == ["sync", "async", "env"], process.stderr


_LEAKED: list[bytearray] = []


def leak() -> None:
    """Allocate some more memory and write to it, so it is resident."""
    _LEAKED.append(bytearray(b"x") * LEAK)


def leaky() -> CountingEnv:
    return CountingEnv(fault=Fault(leak, "step", repeat=True))


def run(kind: Any, factory: Any, limit: int | None, **options: Any) -> Any:
    """Return six rows of each worker and more, statistics and the most memory."""
    rows: dict[int, list[Any]] = {0: [], 1: []}
    options |= {"frames_per_batch": 40, "seed": 0, "max_worker_rss": limit}
    largest = 0
    with kind([factory] * 2, **options) as collector:
        while min(map(len, rows.values())) < 6:
            for row in collector.next().clone():
                rows[int(row["collector", "traj_ids"][0]) >> 32].append(row)
            largest = max(largest, *map(resident_bytes, collector.worker_pids))
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
            assert (row == other).all()
