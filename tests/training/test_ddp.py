"""Ranks that learn with DDP end together with the first cause.

Each rank collects in a worker of its own; gloo connects them. That their weights stay
equal is in ``test_checkpoint_of_ranks.py``.
"""

import re
import signal
import time
from pathlib import Path

import pytest
import torch
from support.processes import SOON, wait_until_gone
from support.ranks import job, outputs, torchrun

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_ppo.py"

FAILS = """
import os
import signal
import sys
import time

import torch.distributed as dist

from marl_collect import MultiSyncCollector
from marl_collect.training.checkpoint import Checkpoint
from support.learners import Learner
from workloads.counting import CountingEnv, Fault

folder, victim, fault = sys.argv[1:]
if not dist.is_initialized():
    dist.init_process_group("gloo")
fails = dist.get_rank() == int(victim)
learner = Learner(dist.get_rank())


def make_env():
    breaks = fails and fault == "environment"
    return CountingEnv(fault=Fault("raise", at=100) if breaks else None)


with (
    MultiSyncCollector(
        make_env, learner.policy, num_workers=1, frames_per_batch=8, seed=5
    ) as collector,
    Checkpoint(folder, {"policy": learner.policy}) as checkpoint,
):
    # In one write: the ranks of torchrun share a pipe.
    print(f"worker {collector.worker_pids[0]}\\n", end="", flush=True)
    for number in range(10**6):
        batch = collector.next()
        if fails and number == 5 and fault != "environment":
            print("fails at", time.time(), flush=True)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("the first cause")
        learner.update(batch)
        checkpoint.batch_done()
"""
CAUSES = {
    "raise": "KeyError: 'the first cause'",
    "environment": "CountingError: fault in step",
}


def workers(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"worker (\d+)", text)]


@pytest.mark.parametrize(
    ("ranks", "victim", "fault"),
    [(2, 1, "raise"), (3, 1, "kill"), (4, 0, "kill"), (3, 2, "environment")],
)
def test_a_rank_that_ends_is_the_end_of_all_ranks_and_their_workers(
    ranks: int, victim: int, fault: str, tmp_path: Path
) -> None:
    with job(tmp_path, FAILS, ranks, str(victim), fault) as programs:
        texts = outputs(programs)
    codes = [program.returncode for program in programs]
    expected = [1] * ranks
    expected[victim] = -signal.SIGKILL if fault == "kill" else 1
    assert codes == expected, texts
    pids = workers("".join(texts))
    assert len(pids) == ranks
    wait_until_gone(pids)
    for rank, text in enumerate(texts):
        if fault != "kill":
            assert (CAUSES[fault] in text) == (rank == victim)


def test_torchrun_names_the_rank_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    done = torchrun(tmp_path, script, 3, str(tmp_path), "2", "kill")
    ended = time.time()
    assert done.returncode != 0
    (failed,) = re.findall(r"fails at (\S+)", done.stdout)
    assert ended - float(failed) < 2 * SOON
    # It asks ten times a second who has ended, so the others may be named as well.
    assert re.search(r"rank +: 2 ", done.stderr), done.stderr
    assert "Signal 9 (SIGKILL) received" in done.stderr
    pids = workers(done.stdout)
    assert len(pids) == 3
    wait_until_gone(pids)


def test_the_example_trains_with_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    budget = "--frames 320 --batch 160 --minibatch 80 --epochs 1 --workers 1"
    done = torchrun(tmp_path, EXAMPLE, 2, *budget.split(), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("320 frames, return per walker") == 1
    rows = (tmp_path / "progress.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["frames", "160", "320"]
    assert (tmp_path / "policy.pt").exists()
    states = [
        torch.load(tmp_path / f"rank-{rank}-of-2" / "checkpoints" / "last.pt")["parts"]
        for rank in range(2)
    ]
    for part in ("policy", "critic"):
        first, second = (state[part] for state in states)
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert [len(state["rows"]) for state in states] == [2, 0]
