"""With ``on_worker_failure="restart"`` collectors continue after every failure."""

import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_tools import KINDS, constant, faulty_once, kill, next_from
from support.clocks import LIMIT, Clock, hangs_in_c
from support.processes import suspend, wait_until_gone
from support.scripts import run_python
from workloads.counting import CountingEnv, Fault, stuck

from marl_collect.collectors import MultiSyncCollector
from marl_collect.errors import WorkerError

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


@pytest.mark.parametrize("silenced", [False, True])
def test_a_restart_is_logged_and_can_be_silenced(
    silenced: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    factory = faulty_once(tmp_path / "failed", "raise", "step", at=25)
    log = logging.getLogger("marl_collect")
    log.setLevel(logging.ERROR if silenced else logging.NOTSET)
    try:
        with MultiSyncCollector(
            [CountingEnv, factory], frames_per_batch=20, on_worker_failure="restart"
        ) as collector:
            while collector.stats()["restarts"] < 1:
                collector.next()
    finally:
        log.setLevel(logging.NOTSET)
    records = [r for r in caplog.records if r.name.startswith("marl_collect.")]
    assert len(records) == (0 if silenced else 1)
    for record in records:
        assert record.getMessage().startswith("Restarting: Worker 1 (pid ")
        assert "fault in step" in record.getMessage()
    assert capfd.readouterr().err == ""  # Only handlers of the user print.


def test_a_worker_that_reads_nothing_of_a_large_message_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    policy: Any = constant()
    with MultiSyncCollector(
        [CountingEnv] * 2,
        policy,
        frames_per_batch=20,
        on_worker_failure="restart",
        timeout=LIMIT,
    ) as collector:
        for _ in range(2):  # All slots are mapped.
            collector.next()
        policy.module.large_setting = bytes(5_000_000)
        collector.update_policy_weights_()
        pids = collector.worker_pids
        suspend(pids[1])
        clock.runs_when = lambda: clock.quiet == {1} and collector.worker_pids == pids
        collector.next()
        assert collector.stats()["restarts"] == 1
        collector.next()


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
from fault_tools import KINDS, constant, next_from
from support.processes import gone, wait_until_gone
from workloads.counting import CountingEnv

def descriptors():
    return len(os.listdir("/proc/self/fd"))

for kind in KINDS:
    with kind(
        [CountingEnv] * 2, constant(), frames_per_batch=20, on_worker_failure="restart"
    ) as collector:
        for k in range(6):
            next_from(collector, k % 2)
        files = descriptors()
        for k in range(6):
            pid = collector.worker_pids[k % 2]
            os.kill(pid, signal.SIGKILL)
            wait_until_gone([pid])
            while collector.stats()["restarts"] == k:
                assert torch.isfinite(collector.next()["extremes"]).all()
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
