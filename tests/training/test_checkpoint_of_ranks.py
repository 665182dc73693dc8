"""Ranks that learn with DDP keep equal weights, stop together and resume together."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import SOON, wait_until, wait_until_gone
from support.scripts import Program, run_python, start_python

pytestmark = pytest.mark.processes

JOB = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from marl_collect import MultiSyncCollector, describe
from marl_collect.models import make_policy
from marl_collect.training import checkpoint as module
from workloads.counting import CountingEnv

folder, batches, resume = sys.argv[1], int(sys.argv[2]), "--resume" in sys.argv
module.SAVE_SECONDS = 0.0  # Each batch takes longer.
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
)
torch.manual_seed(rank)  # DDP sends the weights of rank 0 to all.
description = describe(CountingEnv)
policy = make_policy(description, num_cells=[8])
ddp = DistributedDataParallel(policy)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
rows = []
parts = {"policy": policy, "optimizer": optimizer, "rows": rows}
with (
    MultiSyncCollector(
        CountingEnv, policy, num_workers=1, envs_per_worker=2, frames_per_batch=20,
        total_frames=20 * batches, seed=5,
    ) as collector,
    module.Checkpoint(
        f"{folder}/run", parts | {"collector": collector}, resume=resume
    ) as checkpoint,
):
    print("pids", *collector.worker_pids, flush=True)
    for batch in collector:
        data = ddp(batch.reshape(-1).clone())
        loss = 0.0
        for group in description.groups:
            reward = data["next", group, "reward"][..., 0]
            loss += (data[group, "action_log_prob"] * reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collector.update_policy_weights_()
        rows.append(batch["collector", "traj_ids"].clone())
        stats = collector.stats(all_ranks=True)
        assert stats["frames"] == ranks * collector.frames
        print("batch", collector.frames, flush=True)
        checkpoint.batch_done()
torch.save(
    {"weights": [*policy.parameters()], "rows": rows, "stats": stats},
    f"{folder}/result-{rank}.pt",
)
"""


@pytest.fixture
def jobs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(jobs: ExitStack, folder: Path, ranks: int, *arguments: str) -> list[Program]:
    """Start all ranks of a job."""
    (folder / "job.py").write_text(JOB)
    (folder / "meet").unlink(missing_ok=True)
    return [
        jobs.enter_context(
            start_python(
                "job.py",
                str(folder),
                *arguments,
                cwd=folder,
                stderr=-2,
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
            )
        )
        for rank in range(ranks)
    ]


def outputs(programs: Sequence[Program]) -> list[str]:
    return [program.communicate(timeout=3 * SOON)[0] for program in programs]


def read_until(program: Program, line: str) -> str:
    assert program.stdout is not None
    text = ""
    for part in program.stdout:
        text += part
        if part.strip() == line:
            return text
    raise AssertionError(text)


def results(folder: Path, ranks: int) -> list[Any]:
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(ranks)]


def test_weights_of_all_ranks_are_equal_after_50_updates(
    jobs: ExitStack, tmp_path: Path
) -> None:
    texts = outputs(start(jobs, tmp_path, 2, "50"))
    assert all("batch 1000" in text for text in texts), texts
    first, second = results(tmp_path, 2)
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other)
    environments = [
        {int(number) >> 32 for ids in rank["rows"] for number in ids.unique()}
        for rank in (first, second)
    ]
    assert environments == [{0, 1}, {2, 3}]
    for name in ("frames", "episodes", "batches", "mean_team_return"):
        assert first["stats"][name] == second["stats"][name]
    assert first["stats"]["frames"] == 2000


def test_a_job_goes_on_exactly_after_one_rank_got_a_signal(
    jobs: ExitStack, tmp_path: Path
) -> None:
    """Also after it was killed while the last checkpoint was being written."""
    straight = tmp_path / "straight"
    straight.mkdir()
    outputs(start(jobs, straight, 2, "12"))
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    programs = start(jobs, stopped, 2, "12")
    read_until(programs[1], "batch 60")
    programs[1].send_signal(signal.SIGTERM)
    texts = outputs(programs)
    assert [program.returncode for program in programs] == [143, 143], texts
    (stopped / "run" / "rank-1-of-2" / "checkpoints" / "last.pt").unlink()
    texts = outputs(start(jobs, stopped, 2, "12", "--resume"))
    assert "Resumed" in texts[0]
    for expected, actual in zip(results(straight, 2), results(stopped, 2), strict=True):
        for name in ("weights", "rows"):
            for one, other in zip(expected[name], actual[name], strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_job_resumes_on_as_many_ranks_only(
    ranks: int, jobs: ExitStack, tmp_path: Path
) -> None:
    outputs(start(jobs, tmp_path, 2, "2"))
    texts = outputs(start(jobs, tmp_path, ranks, "4", "--resume"))
    for text in texts:
        assert "another number of ranks saved" in text


def test_a_killed_rank_ends_the_others_and_their_workers(
    jobs: ExitStack, tmp_path: Path
) -> None:
    programs = start(jobs, tmp_path, 2, "100000")
    pids = []
    for program in programs:
        text = read_until(program, "batch 40")
        line = next(line for line in text.splitlines() if line.startswith("pids"))
        pids += [int(pid) for pid in line.split()[1:]]
    programs[1].kill()
    text = outputs(programs[:1])[0]
    assert programs[0].returncode == 1
    assert "Connection closed by peer" in text or "Connection reset" in text
    wait_until_gone(pids)
    wait_until(lambda: programs[1].poll() is not None)


def test_the_example_trains_with_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    done = run_python(
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        *["--local-addr", "127.0.0.1"],  # The host's name may not be resolved.
        Path(__file__).parents[2] / "examples" / "ddp_ppo.py",
        *["--frames", "320", "--batch", "160", "--minibatches", "1", "--epochs", "1"],
        cwd=tmp_path,
        interpreter=True,
    )
    assert done.returncode == 0, done.stderr
    assert "random actions" in done.stdout
    assert "320 frames, return per walker" in done.stdout
