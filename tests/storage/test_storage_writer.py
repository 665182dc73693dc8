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
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from storage_streams import ABOUT, Stream, collected, frames_of, read, write
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


def holds(path: Path, *batches: TensorDict) -> bool:
    """Whether a dataset has the frames of these batches, in this order."""
    expected = torch.cat([batch.reshape(-1) for batch in batches])
    frames = open_dataset(path).transitions[:]
    return len(frames) == len(expected) and bool((frames == expected).all())


def names(folder: Path) -> set[str]:
    """Return what is in a folder besides the cache."""
    return {path.name for path in folder.iterdir()} - {".cache"}


def test_reading_unpickles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = collected(batches=1)
    write(tmp_path / "d", data, description)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for module in ("pickle", "_pickle", "torch"):
        monkeypatch.setattr(f"{module}.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("builtins.exec", refuse)
    assert holds(tmp_path / "d", data[0])
    assert len(names(tmp_path / "d")) == 1


def test_a_link_to_a_file_is_read_like_the_file(tmp_path: Path) -> None:
    description, data = collected(batches=1)
    write(tmp_path / "d", data, description)
    (file,) = (tmp_path / "d").glob("*.parquet")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / file.name).symlink_to(file)
    assert holds(tmp_path / "linked", data[0])


def test_the_description_survives_the_round_trip(tmp_path: Path) -> None:
    description, data = collected(batches=1)
    settings = {"size": (5, 5), "weights": {1: (0.5, None)}}
    description = DatasetDescription("counting", description.environment, settings)
    for seed in (5, 6):  # What JSON changes does not prevent appending.
        run = RunDescription(seed, {"kind": "random"})
        write(tmp_path / "d", data, description, run)
    dataset = open_dataset(tmp_path / "d")
    assert dataset.description.task == "counting"
    assert dataset.description.environment == description.environment
    assert dataset.description.env_kwargs["size"] == [5, 5]
    assert [run.seed for run in dataset.runs] == [5, 6]
    assert dataset.run_frames == [20, 20]
    assert dataset.runs[0].policy == {"kind": "random"}
    assert dataset.runs[0].versions["torch"] == torch.__version__
    keys = {column.key: column for column in dataset.keys}
    for key, leaf in description.environment.observed().items():
        assert keys[key].shape == leaf.shape
        assert keys["next", *key].dtype == leaf.dtype.name
    other = DatasetDescription("counting", description.environment, {"size": (5, 6)})
    with pytest.raises(ValueError, match=r"size is \[5, 6\], but \[5, 5\] in"):
        Writer(tmp_path / "d", other)


def without(*keys: Any) -> Any:
    return lambda batch: batch.exclude(*keys)


def with_key(key: Any, value: Any = None) -> Any:
    """Return a function that sets a key; a function makes its value from the batch."""
    make = value or (lambda batch: batch["next", "done"])
    return lambda batch: batch.clone().set(key, make(batch))


def not_finite(batch: TensorDict) -> TensorDict:
    batch["next", "hunter", "reward"][1, 0, 1] = float("nan")
    batch["next", "done"][1, -1] = True
    return batch


ACTION = ("prey", "action")
REFUSALS: dict[str, tuple[Any, str]] = {
    "no ids": (
        without(("collector", "traj_ids")),
        "collect with track_traj_ids=True",
    ),
    "no flags": (without(("next", "done")), r"has no \('next', 'done'\)"),
    "run": (with_key("run"), "the names run and frame_index are taken"),
    "frame_index": (with_key("frame_index"), "the names run and frame_index are taken"),
    "a deep key": (with_key(("a",) * 101), "at most 100 parts"),
    "no frames": (lambda b: b[:, :0], r"the shape \[2, 0\], so no frames"),
    "another key": (
        with_key("more"),
        r"more.* is bool \[1\], but missing in the dataset",
    ),
    "another shape": (
        with_key(ACTION, lambda b: torch.zeros(*b.shape, 3, 7)),
        r"action.* but .* in the dataset",
    ),
    "another dtype": (
        with_key(ACTION, lambda b: b[ACTION].double()),
        r"action.* is float64 .* but .* in the dataset",
    ),
    "not finite": (
        lambda b: not_finite(b.clone()),
        "Agent 1 of the group 'hunter' has the return nan in episode",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_batch_that_is_refused_changes_nothing(tmp_path: Path, kind: str) -> None:
    description, data = collected(batches=3)
    with Writer(tmp_path / "d", description) as writer:
        writer.add(data[0])
        before = names(tmp_path / "d")
        change, message = REFUSALS[kind]
        with pytest.raises(ValueError, match=message):
            writer.add(change(data[1]))
        assert names(tmp_path / "d") == before
        writer.add(data[1])  # The writer is still open.
        assert writer.frames == 40
    write(tmp_path / "d", data[2:], description)
    assert holds(tmp_path / "d", *data)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    description, data = collected(batches=1)
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match=r"no dataset, but thesis\.tex"):
        Writer(tmp_path, description)
    with pytest.raises(NotADirectoryError, match="is a file"):
        Writer(tmp_path / "thesis.tex", description)
    assert names(tmp_path) == {"thesis.tex"}
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "README.md").write_text("# Mine")
    write(tmp_path / "d", data, description)
    (tmp_path / "d" / "notes.txt").write_text("mine")
    write(tmp_path / "d", data, description)
    assert holds(tmp_path / "d", data[0], data[0])


def test_a_writer_that_added_nothing_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = collected(batches=1)
    monkeypatch.chdir(tmp_path)
    Writer("d", description).close()
    assert names(tmp_path) == set()
    with Writer("d", description) as writer:
        monkeypatch.chdir("/")  # A writer does not look for its folder again.
        assert writer.path == tmp_path / "d"
        other = Writer(tmp_path / "d", description)
        other.close()
        writer.add(data[0])
    assert holds(tmp_path / "d", data[0])


def test_a_folder_that_cannot_be_cleaned_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = collected(batches=1)
    write(tmp_path / "d", data, description)
    (tmp_path / "d" / ".x.parquet.tmp").mkdir()
    monkeypatch.setattr(writing, "_ABANDONED_SECONDS", -1)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"x\.parquet\.tmp"):
        Writer(tmp_path / "d", description)
    assert set(os.listdir("/proc/self/fd")) == before


def test_cleaning_deletes_no_batch_that_another_writer_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = collected(batches=2)
    write(tmp_path / "d", data[:1], description)
    other = Writer(tmp_path / "d", description)
    glob = Path.glob
    added: list[TensorDict] = []

    def adds_meanwhile(path: Path, pattern: str) -> list[Path]:
        paths = list(glob(path, pattern))
        if added:  # Whatever lists the folder after the one that it begins with.
            other.add(added.pop())
        return paths

    monkeypatch.setattr(Path, "glob", adds_meanwhile)
    run = storage_files.new_run([])

    def begin(files: Any) -> str:
        added.append(data[1])
        return run

    monkeypatch.setattr(writing, "new_run", begin)
    Writer(tmp_path / "d", description).close()
    monkeypatch.undo()
    other.close()
    assert holds(tmp_path / "d", *data)


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
    tmp_path: Path, call: int, number: int
) -> None:
    description, data = collected(batches=4)
    path = tmp_path / "d"
    with Writer(path, description) as writer:
        writer.add(data[0])
        with failing(call, number), pytest.raises(BrokenDiskError) as error:
            writer.add(data[1])
        if number != errno.EIO:
            advice = "Free some space" if number == errno.ENOSPC else "ulimit -f"
            assert advice in str(error.value)
            assert str(path) in str(error.value)
        with pytest.raises(ClosedError, match="Open a new writer") as excinfo:
            writer.add(data[1])
        assert isinstance(excinfo.value.__cause__, BrokenDiskError)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(writer._folder)
        assert writer.frames == 20
    # The file may be complete although the last sync failed.
    count = len(open_dataset(path)) // 20
    assert count == (2 if call == 3 else 1)
    assert len(names(path)) == count
    write(path, data[count:], description)
    assert holds(path, *data)


@pytest.mark.parametrize(
    "error", [KeyError("first"), KeyboardInterrupt(), SystemExit(3)]
)
def test_an_error_in_closing_does_not_hide_the_first_one(
    tmp_path: Path, error: BaseException
) -> None:
    description, data = collected(batches=2)
    writer = Writer(tmp_path / "d", description)
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
def test_a_fork_does_not_write(tmp_path: Path) -> None:
    description, data = collected(batches=1)
    writer = Writer(tmp_path / "d", description)
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
    assert holds(tmp_path / "d", data[0])


@pytest.mark.parametrize("size", [3, 600])
def test_small_batches_are_joined_and_large_ones_are_not(
    tmp_path: Path, size: int
) -> None:
    images = {"image": (torch.uint8, (size, size, 3))}
    batches = Stream(extras=images).batches(3, 8)
    with Writer(tmp_path, ABOUT) as writer:
        for batch in batches:
            writer.add(batch)
        assert len(names(tmp_path)) == 3
    last = "000000-000002.parquet" if size == 3 else "000002-000002.parquet"
    files = sorted(names(tmp_path))
    assert (len(files), files[-1].partition(".")[2]) == (1 if size == 3 else 3, last)
    assert read(tmp_path) == frames_of(*batches)


def test_the_background_writer_writes_in_order_and_reports_episodes(
    tmp_path: Path,
) -> None:
    description, data = collected(batches=4, max_frames_per_traj=5)
    reported: list[Any] = []
    writer = Writer(tmp_path / "d", description)
    with BackgroundWriter(writer, reported.extend) as background:
        for batch in data:
            background.add(batch)
    assert holds(tmp_path / "d", *data)
    assert reported == open_dataset(tmp_path / "d").trajectories.episodes
    assert len(reported) > 3
    returns = [episode.team_return for episode in reported]
    assert np.allclose(returns, open_dataset(tmp_path / "d").trajectories.returns)


def test_a_background_writer_that_failed_or_closed_accepts_no_batch(
    tmp_path: Path,
) -> None:
    description, data = collected(batches=3)
    background = BackgroundWriter(Writer(tmp_path / "c", description))
    background.add(data[0])
    background.add(data[0])
    with pytest.raises(ValueError, match="set_truncated=True causes"):
        background.add(data[0])
    background.close()
    assert holds(tmp_path / "c", data[0])
    writer = Writer(tmp_path / "d", description)
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
    assert holds(tmp_path / "d", data[0])
    background = BackgroundWriter(Writer(tmp_path / "e", description))
    with failing(0):
        background.add(data[0])
        with pytest.raises(BrokenDiskError):
            background.close()
    background.close()


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
