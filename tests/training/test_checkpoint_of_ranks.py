"""Ranks that learn with DDP keep equal weights, stop together and resume together."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import wait_until_gone
from support.ranks import job, outputs, run_ranks, torchrun
from support.scripts import Program

from marl_collect.training.checkpoint import Checkpoint

pytestmark = pytest.mark.processes

JOB = """
import torch

from marl_collect import MultiSyncCollector
from marl_collect.training import checkpoint as module
from support.learners import Learner
from workloads.counting import CountingEnv

batches, resume = int(arguments[0]), "--resume" in arguments
module.SAVE_SECONDS = 0.0  # Each batch takes longer.
learner = Learner(rank)
rows, weights = [], []
parts = {"policy": learner.policy, "optimizer": learner.optimizer, "rows": rows}
with (
    MultiSyncCollector(
        CountingEnv, learner.policy, num_workers=1, envs_per_worker=2,
        frames_per_batch=20, total_frames=20 * batches, seed=5,
    ) as collector,
    module.Checkpoint(
        f"{folder}/run", parts | {"collector": collector}, resume=resume
    ) as checkpoint,
):
    print("pids", *collector.worker_pids, flush=True)
    for batch in collector:
        weights.append(learner.update(batch))
        collector.update_policy_weights_()
        rows.append(batch["collector", "traj_ids"].clone())
        stats = collector.stats(all_ranks=True)
        assert stats["frames"] == world_size * collector.frames
        print("batch", collector.frames, flush=True)
        checkpoint.batch_done()
torch.save(
    {"weights": weights, "rows": rows, "stats": stats},
    f"{folder}/result-{rank}.pt",
)
"""


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


def test_a_job_goes_on_exactly_after_one_rank_got_a_signal(tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir()
    stopped.mkdir()
    run_ranks(straight, JOB, 2, "12")
    with job(stopped, JOB, 2, "12") as programs:
        read_until(programs[1], "batch 60")
        programs[1].send_signal(signal.SIGTERM)
        texts = outputs(programs)
    assert [program.returncode for program in programs] == [143, 143], texts
    texts = run_ranks(stopped, JOB, 2, "12", "--resume")
    assert "Resumed" in texts[0]
    first, second = results(straight, 2)
    weights = torch.stack(first["weights"])
    assert len(weights.unique(dim=0)) == 12  # Each update changes them.
    assert torch.equal(weights, torch.stack(second["weights"]))  # DDP keeps them equal.
    for expected, actual in zip((first, second), results(stopped, 2), strict=True):
        assert torch.equal(actual["weights"][-1], expected["weights"][-1])
        assert all(map(torch.equal, expected["rows"], actual["rows"]))
    environments = [
        {int(number) >> 32 for ids in rank["rows"] for number in ids.unique()}
        for rank in (first, second)
    ]
    assert environments == [{0, 1}, {2, 3}]
    for name in ("frames", "episodes", "batches", "mean_team_return"):
        assert first["stats"][name] == second["stats"][name]
    assert first["stats"]["frames"] == 2 * 12 * 20


@pytest.mark.parametrize("numbers", [("0", 2), (0, "2"), (1.0, 2), (True, 2)])
def test_numbers_of_ranks_are_integers(numbers: Any, tmp_path: Path) -> None:
    """Each names a folder."""
    rank, world_size = numbers
    with pytest.raises(TypeError, match="must be an integer of at least"):
        Checkpoint(tmp_path, {"rows": []}, rank=rank, world_size=world_size)


SAVES = """
import signal
from pathlib import Path

from marl_collect.core.ranks import Ranks
from marl_collect.training import checkpoint as module

victim, moment = int(arguments[0]), arguments[1]
run = Ranks.of(None, None).gather(os.urandom(4).hex(), "the test")[0]
data = {"steps": []}
is_due = False


def or_die(happens, when):
    def instead(*arguments):
        if is_due and moment == f"before {when}":
            os.kill(os.getpid(), signal.SIGKILL)
        result = happens(*arguments)
        if is_due and moment == f"after {when}":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return instead


module.write_tensors = or_die(module.write_tensors, "writing")
Path.replace = or_die(Path.replace, "renaming")
with module.Checkpoint(f"{folder}/run", {"data": data}, resume=True) as checkpoint:
    print("begins", *data["steps"], flush=True)
    for step in range(3):
        data["steps"].append(f"{run}-{step}")
        is_due = rank == victim and step == 2
        checkpoint.save()
"""


def test_ranks_killed_while_they_save_resume_from_one_moment(tmp_path: Path) -> None:
    steps = 0
    for victim, moment, saves in [
        (1, "before writing", 2),
        (0, "after writing", 2),  # Only rank 0 has the third.
        (1, "before renaming", 2),  # Before its new file has the final name.
        (0, "after renaming", 3),
        (1, "after renaming", 3),
        (1, "after writing", 3),
    ]:
        texts = run_ranks(tmp_path, SAVES, 2, str(victim), moment)
        first, second = (
            next(line for line in text.splitlines() if line.startswith("begins"))
            for text in texts
        )
        assert first == second
        assert steps <= len(first.split()) - 1 <= steps + 1
        steps = len(first.split()) - 1 + saves


LATE = """
import signal

from marl_collect.training.checkpoint import Checkpoint

data = {"steps": []}
with Checkpoint(f"{folder}/run", {"data": data}, resume=True) as checkpoint:
    print("begins", *data["steps"], flush=True)
    data["steps"].append("saved")
    checkpoint.save()
    data["steps"].append("end")
    if str(rank) in arguments:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_after_the_last_batch_is_saved_if_all_ranks_get_it(
    tmp_path: Path,
) -> None:
    for signalled, steps in (
        (["1"], ""),
        (["0", "1"], " saved"),
        ([], " saved saved end"),
    ):
        for rank, text in enumerate(run_ranks(tmp_path, LATE, 2, *signalled)):
            assert f"begins{steps}\n" in text
            told = "To go on, begin with resume=True" in text
            assert told == (str(rank) in signalled)


ERRORS = """
from marl_collect.training.checkpoint import Checkpoint


class Part:
    fails = False

    def state_dict(self):
        if self.fails:
            raise OSError("no space for it")
        return {"step": self.step}

    def load_state_dict(self, state):
        if self.fails:
            raise KeyError("no step")
        self.step = state["step"]


def tried(resume, act):
    try:
        with Checkpoint(f"{folder}/run", {"part": part}, resume=resume) as checkpoint:
            act(checkpoint)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def save(checkpoint):
    for step in range(3):
        part.step, part.fails = step, rank == 1 and step == 1
        try:
            checkpoint.save()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)


part = Part()
tried(False, save)
tried(rank == 0, print)
part.fails = rank == 1
tried(True, print)
part.fails = False
tried(True, lambda checkpoint: print("step", part.step, flush=True))
file = f"{folder}/run/rank-{rank}-of-2/checkpoints/last.pt"
if rank == 0:
    with open(file, "r+b") as damaged:
        damaged.truncate(100)
tried(True, print)
"""


def test_errors_of_a_rank_in_saving_and_loading_are_of_all(tmp_path: Path) -> None:
    texts = run_ranks(tmp_path, ERRORS, 2)
    for rank, text in enumerate(texts):
        lines = [line for line in text.splitlines() if "Resumed" not in line]
        saving, resuming, loading, step, reading = lines
        assert "OSError: no space for it" in saving
        assert ("Checkpoint.save() failed on rank 1" in saving) == (rank == 0)
        assert resuming.startswith("RuntimeError: resume is [True, False] on ranks")
        assert "KeyError: 'no step'" in loading
        assert ("Checkpoint(resume=True) failed on rank 1" in loading) == (rank == 0)
        assert step == "step 2"
        assert "last.pt is damaged" in reading
        assert ("Checkpoint() failed on rank 0" in reading) == (rank == 1)


def test_checkpoints_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        run_ranks(tmp_path / name, SAVES, 2, "2", "")
    parts = [tmp_path / name / "run" / "rank-1-of-2" for name in ("one", "other")]
    shutil.rmtree(parts[0])
    shutil.copytree(parts[1], parts[0])
    for text in run_ranks(tmp_path / "one", SAVES, 2, "2", ""):
        assert "The ranks have no common checkpoint" in text
        assert text.count("has number 3 of run ") == 2
        assert "begins" not in text
    shutil.rmtree(parts[0])
    for text in run_ranks(tmp_path / "one", SAVES, 2, "2", ""):
        assert "rank 1 has none" in text


def test_each_rank_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoint(tmp_path / "job", {"rows": []}, rank=1, world_size=2).save()
    assert (tmp_path / "job" / "rank-1-of-2" / "checkpoints" / "last.pt").exists()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    Checkpoint(tmp_path / "alone", {"rows": []}, rank=0, world_size=1).save()
    assert (tmp_path / "alone" / "checkpoints" / "last.pt").exists()
    with pytest.raises(ValueError, match="pass both"):
        Checkpoint(tmp_path, {}, rank=0)


def test_late_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all of them would write to one folder, each at another time."""
    checkpoint = Checkpoint(tmp_path, {"rows": []})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for act in (checkpoint.__enter__, checkpoint.save, checkpoint.batch_done):
        with pytest.raises(RuntimeError, match=r"build it after init_process_group"):
            act()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_job_resumes_on_as_many_ranks_only(ranks: int, tmp_path: Path) -> None:
    Checkpoint(tmp_path, {"rows": []}, rank=0, world_size=2).save()
    resumed = Checkpoint(tmp_path, {}, resume=True, rank=0, world_size=ranks)
    with pytest.raises(ValueError, match="another number of ranks saved than"):
        resumed.__enter__()


EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_ppo.py"

FAILS = """
import signal

from marl_collect import MultiSyncCollector
from marl_collect.training.checkpoint import Checkpoint
from support.learners import Learner
from workloads.counting import CountingEnv, Fault

victim, fault = arguments
fails = rank == int(victim)
learner = Learner(rank)


def make_env():
    breaks = fails and fault == "environment"
    return CountingEnv(fault=Fault("raise", at=100) if breaks else None)


with (
    MultiSyncCollector(
        make_env, learner.policy, num_workers=1, frames_per_batch=8, seed=5
    ) as collector,
    Checkpoint(folder, {"policy": learner.policy}) as checkpoint,
):
    print("worker", collector.worker_pids[0], flush=True)
    for number in range(10**6):
        batch = collector.next()
        if fails and number == 5 and fault != "environment":
            if "kill" in fault:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("the first cause")
        learner.update(batch)
        checkpoint.batch_done()
"""
CAUSES = {
    "raise": "KeyError: 'the first cause'",
    "environment": "CountingError: fault in step",
}


@pytest.mark.parametrize(
    ("ranks", "victim", "fault"),
    [
        (2, 1, "raise"),
        (3, 1, "kill"),
        (4, 0, "kill under torchrun"),
        (3, 2, "environment"),
    ],
)
def test_a_rank_that_ends_is_the_end_of_all_ranks_and_their_workers(
    ranks: int, victim: int, fault: str, tmp_path: Path
) -> None:
    with job(tmp_path, FAILS, ranks, str(victim), fault) as programs:
        if "torchrun" in fault:  # It sends a signal to the others.
            programs[victim].wait()
            for program in programs:
                program.send_signal(signal.SIGTERM)
        texts = outputs(programs)
    codes = [program.returncode for program in programs]
    assert codes.pop(victim) == (-signal.SIGKILL if "kill" in fault else 1), texts
    assert set(codes) <= {1, -signal.SIGTERM if "torchrun" in fault else 1}, texts
    pids = [int(pid) for pid in re.findall(r"worker (\d+)", "".join(texts))]
    assert len(pids) == ranks
    wait_until_gone(pids)
    for rank, text in enumerate(texts):
        if fault in CAUSES:
            assert (CAUSES[fault] in text) == (rank == victim)


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
