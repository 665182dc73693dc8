"""Row 7 of the fault matrix: Ctrl-C, which a terminal sends to all processes."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fault_tools import wait_until_gone

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
def test_ctrl_c_is_one_traceback_and_the_end_of_all(body: str, tmp_path: Path) -> None:
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
