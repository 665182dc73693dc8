"""Row 7 of the fault matrix: Ctrl-C, which terminals send to all processes."""

import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_tools import KINDS, Hang, as_soon_as, press_ctrl_c
from support.processes import SOON, wait_until_gone
from support.scripts import start_python
from workloads.counting import CountingEnv, Fault

from marl_collect.errors import ClosedError
from marl_collect.evaluation.evaluator import Evaluator

HEAD = """
from marl_collect import MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from workloads.counting import CountingEnv, Fault

def hanging(phase):
    return lambda: CountingEnv(fault=Fault("hang", phase))

def tell(pids):
    print(*pids, flush=True)
"""
MOMENTS = {
    "async, in a batch": """
        collector = MultiAsyncCollector([CountingEnv] * 2, frames_per_batch=1000)
        tell(collector.worker_pids)
        for _ in collector:
            pass
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
    with start_python(script) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert errors.count("Traceback") == 1, errors
    assert "KeyboardInterrupt" in errors
    assert len(pids) == 2
    wait_until_gone(pids)


def hanging_in_its_second_reset(hang: Hang) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv(fault=Fault(hang, "reset", at=1), max_length=1000)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_during_a_command_to_workers_ends_them(
    kind: Any, tmp_path: Path
) -> None:
    """Otherwise the reply would be taken for the reply to the next command."""
    hang = Hang(tmp_path)
    limits: Any = {"frames_per_batch": 4, "max_frames_per_traj": 1000}
    collector = kind([hanging_in_its_second_reset(hang)] * 2, **limits)
    collector.next()
    pids = collector.worker_pids
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        as_soon_as(lambda: hang.count == 2, press_ctrl_c)
        collector.reset()
    wait_until_gone(pids)
    for use in (
        *(collector.next, collector.reset, collector.state_dict),
        collector.update_policy_weights_,
        lambda: collector.load_state_dict({}),
    ):
        with pytest.raises(ClosedError, match="Ctrl-C"):
            use()
    assert "closed" in repr(collector)


def test_ctrl_c_in_an_evaluation_ends_the_evaluator(tmp_path: Path) -> None:
    hang = Hang(tmp_path)
    evaluator = Evaluator(None, [hanging_in_its_second_reset(hang)] * 2, num_workers=2)
    pids = evaluator.worker_pids
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        as_soon_as(lambda: hang.count == 2, press_ctrl_c)
        evaluator.evaluate(100)
    wait_until_gone(pids)
    with pytest.raises(ClosedError):
        evaluator.evaluate(1)
