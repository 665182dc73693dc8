"""Batches that a writer reports as written are readable, and bad ones change nothing.

Kills are in ``test_storage_kills.py``, the kinds of batches in
``test_storage_kinds.py``.
"""

import contextlib
import errno
import os
import signal
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import pytest
from storage_streams import ABOUT, Stream, frames_of, read, write
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect.errors import ClosedError
from marl_collect.programs.interruption import Interruption
from marl_collect.storage import (
    BackgroundWriter,
    DatasetDescription,
    RunDescription,
    Writer,
    open_dataset,
)
from marl_collect.storage import files as storage_files
from marl_collect.storage import writer as writing
from marl_collect.storage.recording import RecordArguments, collect_into

Batches = list[TensorDict]


def names(folder: Path) -> set[str]:
    """Return what is in a folder besides the cache."""
    return {path.name for path in folder.iterdir()} - {".cache"}


@pytest.fixture
def data() -> Batches:
    return Stream().batches(4)


def test_reading_unpickles_nothing(
    tmp_path: Path, data: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, data)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for module in ("pickle", "_pickle", "torch"):
        monkeypatch.setattr(f"{module}.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("builtins.exec", refuse)
    assert read(tmp_path) == frames_of(*data)
    assert len(names(tmp_path)) == 1


def test_a_link_to_a_file_is_read_like_the_file(tmp_path: Path, data: Batches) -> None:
    write(tmp_path / "d", data)
    (file,) = (tmp_path / "d").glob("*.parquet")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / file.name).symlink_to(file)
    assert read(tmp_path / "linked") == frames_of(*data)


def test_the_description_survives_the_round_trip(tmp_path: Path, data: Batches) -> None:
    settings = {"size": (5, 5), "weights": {1: (0.5, None)}}
    about = DatasetDescription("stream", ABOUT.environment, settings)
    for seed in (5, 6):  # What JSON changes does not prevent appending.
        write(tmp_path, data, about, RunDescription(seed, {"kind": "random"}))
    dataset = open_dataset(tmp_path)
    assert dataset.description.task == "stream"
    assert dataset.description.environment == ABOUT.environment
    assert dataset.description.env_kwargs["size"] == [5, 5]
    assert [run.seed for run in dataset.runs] == [5, 6]
    assert dataset.run_frames == [48, 48]
    assert dataset.runs[0].policy == {"kind": "random"}
    assert dataset.runs[0].versions["torch"] == version("torch")
    other = DatasetDescription("stream", ABOUT.environment, {"size": (5, 6)})
    with pytest.raises(ValueError, match=r"size is \[5, 6\], but \[5, 5\] in"):
        Writer(tmp_path, other)


def with_key(key: Any, value: Any = None) -> Any:
    """Return a function that sets a key; a function makes its value from the batch."""
    make = value or (lambda batch: batch["next", "done"])
    return lambda batch: batch.clone().set(key, make(batch))


def with_reward(reward: float) -> Any:
    """Return a function that sets the reward of an episode which then ends."""

    def change(batch: TensorDict) -> TensorDict:
        batch = batch.clone()
        batch["next", "g", "reward"][1, 0, 1] = reward
        batch["next", "done"][1, -1] = True
        return batch

    return change


ACTION = ("g", "action")
REFUSALS: dict[str, Any] = {
    "collect with track_traj_ids=True": lambda b: b.exclude(("collector", "traj_ids")),
    r"has no \('next', 'done'\)": lambda b: b.exclude(("next", "done")),
    r"'run',\) .* the names run and frame_index are taken": with_key("run"),
    r"'frame_index',\) .* the names run and frame_index": with_key("frame_index"),
    "at most 100 parts": with_key(("a",) * 101),
    r"the shape \[2, 0\], so no frames": lambda b: b[:, :0],
    r"Expected a batch \[B, T\], but found \[12\]": lambda b: b.reshape(-1),
    r"more.* is bool \[1\], but missing in the dataset": with_key("more"),
    r"\[2, 1\], but int64 \[2\] in the": with_key(
        ACTION, lambda b: b[ACTION][..., None]
    ),
    "action.* is float64 .* but int64": with_key(ACTION, lambda b: b[ACTION].double()),
    **{
        f"Agent 1 of the group 'g' has the return {reward}": with_reward(reward)
        for reward in (float("nan"), float("inf"), -float("inf"))
    },
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_batch_that_is_refused_changes_nothing(
    tmp_path: Path, data: Batches, message: str
) -> None:
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(data[0])
        before = names(tmp_path)
        with pytest.raises(ValueError, match=message):
            writer.add(REFUSALS[message](data[1]))
        assert names(tmp_path) == before
        writer.add(data[1])  # The writer is still open.
        assert writer.frames == 24
    write(tmp_path, data[2:])
    assert read(tmp_path) == frames_of(*data)


@pytest.mark.parametrize(
    ("batches", "keywords"),
    [
        (0, {"says_begin": True}),  # The second frame of episode 0 is never its first.
        (8, {"says_begin": True}),
        (8, {}),
        (8, {"ragged": True}),
    ],
)
def test_episodes_that_begin_again_are_refused(
    tmp_path: Path, batches: int, keywords: dict[str, Any]
) -> None:
    stream = Stream(**keywords)
    before = [stream.batch(1), *stream.batches(batches)]
    assert not before[0]["next", "done"].all()
    with Writer(tmp_path, ABOUT) as writer:
        for batch in before:
            writer.add(batch)
        with pytest.raises(ValueError, match="open a new Writer"):
            writer.add(Stream(1, **keywords).batch())
        writer.add(stream.batch())  # Nothing has changed.


def test_folders_of_others_are_refused(tmp_path: Path, data: Batches) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match=r"no dataset, but thesis\.tex"):
        Writer(tmp_path, ABOUT)
    with pytest.raises(NotADirectoryError, match="is a file"):
        Writer(tmp_path / "thesis.tex", ABOUT)
    assert names(tmp_path) == {"thesis.tex"}
    (tmp_path / "d").mkdir()
    for number, name in enumerate(("README.md", "notes.txt")):
        (tmp_path / "d" / name).touch()
        write(tmp_path / "d", data[number : number + 1])
    assert read(tmp_path / "d") == frames_of(*data[:2])


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


def test_cleaning_deletes_no_batch_that_another_writer_adds(
    tmp_path: Path, data: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, data[:1])
    other, glob, run = Writer(tmp_path, ABOUT), Path.glob, storage_files.new_run([])
    added: Batches = []

    def adds_meanwhile(path: Path, pattern: str) -> list[Path]:
        paths = list(glob(path, pattern))
        if added:  # Whatever lists the folder after the one that it begins with.
            other.add(added.pop())
        return paths

    def begin(_: Any) -> str:
        added.append(data[1])
        return run

    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", adds_meanwhile)
        patched.setattr(writing, "new_run", begin)
        Writer(tmp_path, ABOUT).close()
    other.close()
    assert read(tmp_path) == frames_of(*data[:2])


def test_old_temporary_files_are_cleaned(tmp_path: Path) -> None:
    (tmp_path / ".new.parquet.tmp").touch()
    (tmp_path / ".old.parquet.tmp").touch()
    os.utime(tmp_path / ".old.parquet.tmp", (0, 0))
    Writer(tmp_path, ABOUT).close()
    assert names(tmp_path) == {".new.parquet.tmp"}  # It may be of another writer.


def test_runs_are_in_the_order_of_their_beginning_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Stream(0).batch(), Stream(1).batch(), Stream(2).batch()
    write(tmp_path, [batches[0]])

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) - timedelta(days=1)

    monkeypatch.setattr(storage_files, "datetime", Earlier)
    for batch in batches[1:]:
        write(tmp_path, [batch])
    assert read(tmp_path) == frames_of(*batches)


class BrokenDiskError(OSError):
    """A disk that fails."""


@contextlib.contextmanager
def failing(call: int, number: int = errno.EIO) -> Iterator[None]:
    """Let the calls that change what is on disk fail, from one of them on."""
    calls = [0]

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            calls[0] += 1
            if calls[0] > call:
                raise BrokenDiskError(number, "broken disk")
            return function(*args, **keywords)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "rename"):
            patch.setattr(os, name, wrap(getattr(os, name)))
        yield


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


@pytest.mark.parametrize(
    "error", [KeyError("first"), KeyboardInterrupt(), SystemExit(3)]
)
def test_an_error_in_closing_does_not_hide_the_first_one(
    tmp_path: Path, data: Batches, error: BaseException
) -> None:
    writer = Writer(tmp_path / "d", ABOUT)
    for batch in data:
        writer.add(batch)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with pytest.raises(type(error)) as info, failing(0), writer:
            raise error
    assert info.value is error
    text = "While closing: [Errno 5] broken disk"
    assert error.__notes__ == [text]
    # Python does not show the notes of SystemExit.
    expected = [text] if isinstance(error, SystemExit) else []
    assert [str(warning.message) for warning in shown] == expected


@pytest.mark.processes
@pytest.mark.forks
def test_a_fork_does_not_write(tmp_path: Path, data: Batches) -> None:
    writer = Writer(tmp_path / "d", ABOUT)
    background = BackgroundWriter(writer)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for add in (writer.add, background.add):
                with pytest.raises(ClosedError, match="fork"):
                    add(data[0])
            background.close()  # Must not remove the folder.
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    background.add(data[0])
    background.close()
    assert read(tmp_path / "d") == frames_of(data[0])


@pytest.mark.parametrize(
    ("lengths", "numbers"),
    [
        ([8, 8, 8], ["000000-000002"]),
        ([80, 80], ["000000-000000", "000001-000001"]),
        ([8, 8, 80, 8, 8], ["000000-000001", "000002-000002", "000003-000004"]),
    ],
)
def test_small_batches_are_joined_and_large_ones_are_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    numbers: list[str],
) -> None:
    monkeypatch.setattr(writing, "_SMALL_BYTES", 8000)
    stream = Stream()
    batches = [stream.batch(length) for length in lengths]
    run = write(tmp_path, batches)
    assert names(tmp_path) == {f"{run}.{part}.parquet" for part in numbers}
    assert read(tmp_path) == frames_of(*batches)


def test_the_background_writer_writes_in_order_and_reports_episodes(
    tmp_path: Path, data: Batches
) -> None:
    reported: list[Any] = []
    with BackgroundWriter(Writer(tmp_path, ABOUT), reported.extend) as background:
        for batch in data:
            background.add(batch)
    assert read(tmp_path) == frames_of(*data)
    assert reported == open_dataset(tmp_path).trajectories.episodes
    assert len(reported) > 3


def test_a_background_writer_that_failed_or_closed_accepts_no_batch(
    tmp_path: Path, data: Batches
) -> None:
    writer = Writer(tmp_path / "d", ABOUT)
    writer.add(data[0])
    background = BackgroundWriter(writer)
    with failing(0):
        background.add(data[1])
        for _ in range(2):
            with pytest.raises(BrokenDiskError):
                background.add(data[2])
    with pytest.raises(BrokenDiskError):
        background.add(data[2])
    background.close()
    background.close()
    with pytest.raises(ClosedError, match="is closed"):
        background.add(data[2])
    assert read(tmp_path / "d") == frames_of(data[0])
    background = BackgroundWriter(Writer(tmp_path / "e", ABOUT))
    background.add(data[0])
    background.add(data[0])
    with pytest.raises(ValueError, match="set_truncated=True causes"):
        background.close()
    background.close()
    assert read(tmp_path / "e") == frames_of(data[0])


@pytest.mark.processes
def test_an_interruption_ends_a_recording_after_the_batch(tmp_path: Path) -> None:
    arguments = RecordArguments(
        tmp_path / "d",
        CountingEnv,
        frames_per_batch=20,
        frames=2000,
        max_frames_per_traj=5,
    )
    with Interruption() as interruption:

        def interrupt(_: Any) -> None:
            # In a thread of its own, which no signal interrupts.
            interruption.number = signal.SIGINT

        collect_into(arguments, on_episodes=interrupt, interruption=interruption)
    # The thread has a batch while the next one is collected.
    assert 20 <= len(open_dataset(tmp_path / "d")) <= 80
