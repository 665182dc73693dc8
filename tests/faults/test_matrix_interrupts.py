"""Row 7 of the fault matrix: Ctrl-C, which terminals send to all processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from fault_tools import wait_until_gone

from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.collectors.evaluation import Evaluator
from marl_collect.errors import ClosedError
from marl_collect.testing.counting import CountingEnv, Fault

HEAD = """
from marl_collect import MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from marl_collect.testing.counting import CountingEnv, Fault

def hanging(phase):
    return lambda: CountingEnv(fault=Fault("hang", phase))

def tell(pids):
    print(*pids, flush=True)
"""
MOMENTS = {
    "sync, in a batch": """
        collector = MultiSyncCollector([CountingEnv] * 2, frames_per_batch=1000)
        tell(collector.worker_pids)
        for _ in collector:
            pass
    """,
    "async, in a batch": """
        collector = MultiAsyncCollector([CountingEnv] * 2, frames_per_batch=1000)
        tell(collector.worker_pids)
        for _ in collector:
            pass
    """,
    "async, in a reset": """
        collector = MultiAsyncCollector([hanging("reset")] * 2, frames_per_batch=10)
        tell(collector.worker_pids)
        collector.next()
    """,
    "sync, in the shutdown": """
        collector = MultiSyncCollector([hanging("close")] * 2, frames_per_batch=10)
        collector.next()
        tell(collector.worker_pids)
        collector.shutdown(timeout=60)
    """,
    "ParallelEnv, in a step": """
        env = ParallelEnv(2, hanging("step"), num_processes=2)
        tell(env.engine().pids)
        env.rollout(3)
    """,
}


@pytest.mark.parametrize("body", MOMENTS.values(), ids=MOMENTS.keys())
def test_ctrl_c_gives_one_traceback_and_ends_all_processes(
    body: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert errors.count("Traceback") == 1, errors
    assert "KeyboardInterrupt" in errors
    assert len(pids) == 2
    wait_until_gone(pids)


def slow_reset() -> CountingEnv:
    """The first reset is immediate; later resets hang."""
    return CountingEnv(fault=Fault("hang", "reset", at=1), max_length=1000)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_ctrl_c_during_a_command_to_workers_ends_them(kind: Any) -> None:
    """Otherwise the reply would be taken for the reply to the next command."""
    given: Any = {"frames_per_batch": 4, "max_frames_per_traj": 1000}
    collector = kind([slow_reset] * 2, **given)
    collector.next()
    pids = collector.worker_pids
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        collector.reset()
    wait_until_gone(pids)
    with pytest.raises(ClosedError, match="Ctrl-C"):
        collector.next()


def test_ctrl_c_in_an_evaluation_ends_the_evaluator() -> None:
    evaluator = Evaluator(None, [slow_reset] * 2, num_workers=2)
    pids = evaluator.worker_pids
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        evaluator.evaluate(100)
    wait_until_gone(pids)
    with pytest.raises(ClosedError):
        evaluator.evaluate(1)
