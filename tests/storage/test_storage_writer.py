"""Batches that a writer reports as written are readable; bad ones change nothing."""

import errno
import os
import shutil
import signal
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_streams import (
    ABOUT,
    BrokenDiskError,
    Stream,
    failing,
    frames_of,
    killed,
    read,
    write,
)
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect.errors import ClosedError
from marl_collect.models import make_policy
from marl_collect.programs.interruption import Interruption
from marl_collect.storage import (
    BackgroundWriter,
    DatasetDescription,
    RunDescription,
    Writer,
    files,
    open_dataset,
    record,
)
from marl_collect.storage.recording import (
    RecordArguments,
    collect_into,
    describe_policy,
)

Batches = list[TensorDict]


def names(folder: Path) -> set[str]:
    """Return what is in a folder besides the cache."""
    return {path.name for path in folder.iterdir()} - {".cache"}


@pytest.fixture
def data() -> Batches:
    return Stream().batches(4)


def test_reading_unpickles_nothing_and_follows_links(
    tmp_path: Path, data: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d", data)
    (tmp_path / "linked").mkdir()
    for file in (tmp_path / "d").glob("*.parquet"):
        (tmp_path / "linked" / file.name).symlink_to(file)

    loads = [f"{module}.load" for module in ("pickle", "_pickle", "torch")]
    for name in (*loads, "pickle.loads", "builtins.exec"):
        monkeypatch.setattr(name, None)
    assert read(tmp_path / "linked") == frames_of(*data)


def test_the_description_survives_the_round_trip(tmp_path: Path, data: Batches) -> None:
    settings = {"size": (5, 5), "weights": {1: (0.5, None)}}
    about = DatasetDescription("stream", ABOUT.environment, settings)
    for seed, name in ((5, "README.md"), (6, "notes.txt")):
        (tmp_path / name).touch()  # Such files may be there.
        # What JSON changes does not prevent appending.
        write(tmp_path, data, about, RunDescription(seed, {"kind": "random"}))
    dataset = open_dataset(tmp_path)
    assert dataset.description.environment == ABOUT.environment
    assert dataset.description.env_kwargs["size"] == [5, 5]
    assert [run.seed for run in dataset.runs] == [5, 6]
    assert dataset.run_frames == [48, 48]
    assert dataset.runs[0].policy == {"kind": "random"}
    assert dataset.runs[0].versions["torch"] == version("torch")
    other = DatasetDescription("stream", ABOUT.environment, {"size": (5, 6)})
    with pytest.raises(ValueError, match=r"size is \[5, 6\], but \[5, 5\] in"):
        Writer(tmp_path, other)


def with_reward(batch: TensorDict, reward: float) -> TensorDict:
    """Set the reward of an episode which then ends."""
    batch["next", "g", "reward"][1, 0, 1] = reward
    batch["next", "done"][1, -1] = True
    return batch


ACTION, DONE = ("g", "action"), ("next", "done")
REFUSALS: dict[str, Any] = {
    "collect with track_traj_ids=True": lambda b: b.exclude(("collector", "traj_ids")),
    r"has no \('next', 'done'\)": lambda b: b.exclude(DONE),
    r"'run',\) .* names run and frame_index are taken": lambda b: b.set("run", b[DONE]),
    r"'frame_index',\) .* the names run and": lambda b: b.set("frame_index", b[DONE]),
    "at most 100 parts": lambda b: b.set(("a",) * 101, b[DONE]),
    "batch must be a TensorDictBase, but is 5": lambda _: 5,
    "The batch has no valid frames": lambda b: b[:, :0],
    r"Expected a batch \[B, T\], but found \[12\]": lambda b: b.reshape(-1),
    r"more.* is 'bool \[1\]', but 'missing' in the": lambda b: b.set("more", b[DONE]),
    r"\[2, 1\]', but 'int64 \[2\]' in": lambda b: b.set(ACTION, b[ACTION][..., None]),
    "action.* is 'float64 .* but 'int64": lambda b: b.set(ACTION, b[ACTION].double()),
    **{
        f"has the return {x} of agent 1 of": partial(with_reward, reward=x)
        for x in (float("nan"), float("inf"), -float("inf"))
    },
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_batch_that_is_refused_changes_nothing(
    tmp_path: Path, data: Batches, message: str
) -> None:
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(data[0])
        before = names(tmp_path)
        with pytest.raises((TypeError, ValueError), match=message):
            writer.add(REFUSALS[message](data[1].clone()))
        assert names(tmp_path) == before
        writer.add(data[1])  # The writer is still open.
        assert writer.frames == 24
    write(tmp_path, data[2:])
    assert read(tmp_path) == frames_of(*data)


def test_a_writer_that_added_nothing_leaves_no_folder(
    tmp_path: Path, data: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Writer("d", ABOUT).close()
    assert names(tmp_path) == set()
    with Writer("d", ABOUT) as writer:
        monkeypatch.chdir("/")  # A writer does not look for its folder again.
        assert writer.path == tmp_path / "d"
        Writer(tmp_path / "d", ABOUT).close()
        writer.add(data[0])
    assert read(tmp_path / "d") == frames_of(data[0])


def test_cleaning_deletes_old_files_but_nothing_of_another_writer(
    tmp_path: Path, data: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, glob = data[:1], Path.glob
    write(tmp_path, added)
    new, old = (tmp_path / f".{age}.parquet.tmp" for age in ("new", "old"))
    for path in (new, old):
        path.touch()
    os.utime(old, (0, 0))
    other, stream = Writer(tmp_path, ABOUT), Stream(1)

    def outdated(path: Path, pattern: str) -> list[Path]:
        paths = list(glob(path, pattern))
        added.append(stream.batch())
        other.add(added[-1])
        return paths

    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", outdated)
        Writer(tmp_path, ABOUT).close()
    other.close()
    assert len(added) > 2
    assert new.exists() > old.exists()
    assert read(tmp_path) == frames_of(*added)


def test_a_writer_opens_while_another_one_joins_its_files(
    tmp_path: Path, data: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, read_about = Writer(tmp_path, ABOUT), files.read_about
    for batch in data:
        other.add(batch)

    def late(path: Path) -> Any:
        other.close()
        return read_about(path)

    monkeypatch.setattr(files, "read_about", late)
    Writer(tmp_path, ABOUT).close()
    assert read(tmp_path) == frames_of(*data)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EFBIG])
@pytest.mark.parametrize("call", range(4))
def test_an_error_closes_the_writer_and_another_one_goes_on(
    tmp_path: Path, data: Batches, call: int, number: int
) -> None:
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(data[0])
        with failing(call, number), pytest.raises(BrokenDiskError) as error:
            writer.add(data[1])
        advice = {errno.ENOSPC: "Free some space", errno.EFBIG: "ulimit -f"}
        assert advice.get(number, "") in str(error.value)
        assert number == errno.EIO or str(tmp_path) in str(error.value)
        with pytest.raises(ClosedError, match="Open a new writer") as excinfo:
            writer.add(data[1])
        assert isinstance(excinfo.value.__cause__, BrokenDiskError)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(writer._folder)
        assert writer.frames == 12
    # The file may be complete although the last sync failed.
    count = 2 if call == 3 else 1
    assert read(tmp_path) == frames_of(*data[:count])
    assert len(names(tmp_path)) == count
    write(tmp_path, data[count:])
    assert read(tmp_path) == frames_of(*data)


@pytest.mark.parametrize("use", ["close", "add"])
def test_a_dataset_that_is_deleted_while_it_is_written_is_named(
    tmp_path: Path, data: Batches, use: str
) -> None:
    writer = Writer(tmp_path / "d", ABOUT)
    for batch in data[:3]:
        writer.add(batch)
    shutil.rmtree(tmp_path / "d")
    with pytest.raises(FileNotFoundError, match=f"deleted .*: '{tmp_path}/d'"):
        writer.close() if use == "close" else writer.add(data[3])
    writer.close()


@pytest.mark.parametrize("error", [KeyError(1), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_closing_does_not_hide_the_first_one(
    tmp_path: Path, data: Batches, error: BaseException, recwarn: Any
) -> None:
    writer = Writer(tmp_path / "d", ABOUT)
    for batch in data:
        writer.add(batch)
    with pytest.raises(type(error)) as info, failing(0), writer:
        raise error
    assert info.value is error
    assert error.__notes__ == ["While closing: [Errno 5] broken disk"]
    # Python does not show the notes of SystemExit.
    expected = error.__notes__ if isinstance(error, SystemExit) else []
    assert [str(warning.message) for warning in recwarn] == expected


@pytest.mark.processes
@pytest.mark.forks
def test_a_fork_does_not_write(tmp_path: Path, data: Batches) -> None:
    writer = Writer(tmp_path / "d", ABOUT)
    background = BackgroundWriter(writer)

    def use(_: Path) -> None:
        for add in (writer.add, background.add):
            with pytest.raises(ClosedError, match="fork"):
                add(data[0])
        background.close()  # Must not remove the folder.

    assert not killed(-1, False, use, tmp_path)
    background.add(data[0])
    background.close()
    assert read(tmp_path / "d") == frames_of(data[0])


def test_a_background_writer_that_failed_or_closed_accepts_no_batch(
    tmp_path: Path, data: Batches
) -> None:
    write(tmp_path, data[:1])
    background = BackgroundWriter(Writer(tmp_path, ABOUT))
    with failing(0):
        background.add(data[1])
        for _ in range(2):
            with pytest.raises(BrokenDiskError):
                background.add(data[2])
    background.close()
    background.close()
    with pytest.raises(ClosedError, match="is closed"):
        background.add(data[2])
    background = BackgroundWriter(Writer(tmp_path, ABOUT))
    background.add(data[0])
    data[1]["next", "done"][:] = True
    background.add(data[1])
    with pytest.raises(ValueError, match="set_truncated=True causes"):
        background.close()
    background.close()
    assert read(tmp_path) == frames_of(data[0], data[0])


class Noted(torch.nn.Module):
    """A policy whose state_dict has more than tensors."""

    def get_extra_state(self) -> Any:
        return {"note": "mine"}


@pytest.mark.processes
def test_the_description_has_the_policy_and_the_options(tmp_path: Path) -> None:
    policy = make_policy(CountingEnv)
    about: Any = {"task": "count", "env_kwargs": {"n": 2}, "max_frames_per_traj": 4}
    for seed in (1, None, None):
        dataset = record(tmp_path, CountingEnv, policy, frames=40, seed=seed, **about)
    assert len(dataset) == 120
    assert dataset.description.task == "count"
    assert dataset.description.env_kwargs == {"n": 2}
    assert dataset.runs[0].seed == 1
    assert len({run.seed for run in dataset.runs}) == 3
    assert dataset.runs[0].options["max_frames_per_traj"] == 4
    described = describe_policy(policy)
    assert [run.policy for run in dataset.runs] == [described] * 3
    assert described["parameters"] == sum(p.numel() for p in policy.parameters())
    with torch.no_grad():
        next(policy.parameters()).add_(1)
    assert describe_policy(policy)["sha256"] != described["sha256"]
    assert describe_policy(None) == {"kind": "random"}
    assert describe_policy(Noted())["parameters"] == 0


RECORD_REFUSALS: Any = [
    (ValueError, "either episodes or frames", {}),
    (ValueError, "either episodes or frames", {"episodes": 1, "frames": 1}),
    (ValueError, "or pass frames", {"episodes": 1, "reset_at_each_iter": True}),
    (ValueError, "episodes must be an integer of at least 1", {"episodes": 0}),
    (TypeError, "record takes no total_frames: record", {"total_frames": 2}),
    (TypeError, "set_truncated would split episodes", {"set_truncated": True}),
    (TypeError, "no weights: omit it", {"weight_recv_schemes": {"policy": None}}),
    (TypeError, "env_kwargs is stored as JSON, .*type set", {"env_kwargs": {"a": {1}}}),
    (TypeError, "policy_description is .*set", {"policy_description": {"a": {1}}}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), RECORD_REFUSALS)
def test_invalid_arguments_are_refused_before_anything_starts(
    tmp_path: Path, error: Any, message: str, arguments: dict[str, Any]
) -> None:
    amount: Any = {"frames": 1} if error is TypeError else {}
    with pytest.raises(error, match=message):
        record(tmp_path, CountingEnv, **amount, **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_an_interruption_ends_a_recording_after_the_batch(tmp_path: Path) -> None:
    batches: Any = {"frames_per_batch": 20, "max_frames_per_traj": 5}
    arguments = RecordArguments(tmp_path / "d", CountingEnv, frames=2000, **batches)
    with Interruption() as interruption:

        def interrupt(_: Any) -> None:
            # In a thread of its own, which no signal interrupts.
            interruption.number = signal.SIGINT

        collect_into(arguments, on_episodes=interrupt, interruption=interruption)
    # The thread has a batch while the next one is collected.
    assert 20 <= len(open_dataset(tmp_path / "d")) <= 80
