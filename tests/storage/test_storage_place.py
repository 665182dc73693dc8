"""A writer writes only to the folder that it opened, and is the only one there."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from storage_journal import edit
from support.scripts import run_python, start_python
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.errors import ClosedError
from marl_collect.storage import (
    BackgroundWriter,
    DatasetDescription,
    DatasetError,
    Writer,
    appending,
)
from marl_collect.storage.files import FolderLock


@pytest.fixture(scope="module")
def recording() -> tuple[DatasetDescription, list[TensorDict]]:
    collector = Collector([CountingEnv] * 2, frames_per_batch=20, total_frames=80)
    description = DatasetDescription("counting", collector.description)
    return description, [batch.clone() for batch in collector]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_chdir_does_not_move_the_writer(
    recording: tuple[DatasetDescription, list[TensorDict]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description, data = recording
    other = tmp_path / "sub" / "d"
    monkeypatch.chdir(tmp_path)
    writer = Writer("d", description)
    writer.add(data[0])
    with Writer(other, description) as own_writer:
        own_writer.add(data[3])
    monkeypatch.chdir(tmp_path / "sub")
    writer.add(data[1])
    writer.close()
    assert len(open_dataset(tmp_path / "d")) == 2
    assert len(open_dataset(other)) == 1
    assert writer.path == tmp_path / "d"


def test_a_folder_in_place_of_the_writers_is_not_written_to(
    recording: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    description, data = recording
    path, moved = tmp_path / "d", tmp_path / "moved"
    with Writer(path, description) as writer:
        writer.add(data[0])
        path.rename(moved)
        writer.add(data[1])
        assert not path.exists()
        path.mkdir()
        (path / "thesis.tex").write_text("precious")
        writer.add(data[2])
        assert names(path) == {"thesis.tex"}
    dataset = open_dataset(moved)  # Writing went on where the folder is now.
    assert all((a == b).all() for a, b in zip(dataset, data[:3], strict=True))
    assert dataset.contents.totals.episodes == len(dataset.trajectories)


@pytest.mark.parametrize("name", ["data-000000", "journal.jsonl", None])
def test_a_dataset_that_was_removed_is_an_error(
    recording: tuple[DatasetDescription, list[TensorDict]],
    tmp_path: Path,
    name: str | None,
) -> None:
    description, data = recording
    path = tmp_path / "d"
    with Writer(path, description) as writer:
        writer.add(data[0])
        if name is None:
            shutil.rmtree(path)
        else:
            (path / name).unlink()
        with pytest.raises(FileNotFoundError, match="removed while a writer had it"):
            writer.add(data[1])
        with pytest.raises(ClosedError, match="removed while a writer had it open"):
            writer.add(data[1])
    assert path.exists() == (name is not None)


def test_closing_does_not_remove_a_folder_in_place_of_its_own(
    recording: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "d", recording[0])
    (tmp_path / "d").rename(tmp_path / "moved")
    with Writer(tmp_path / "d", recording[0]) as other:
        writer.close()
        other.add(recording[1][0])
    assert len(open_dataset(tmp_path / "d")) == 1


def test_appending_after_a_line_was_removed_cuts_off_no_listed_batch(
    recording: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    description, data = recording
    path = tmp_path / "d"
    for batch in data[:3]:  # One run each.
        with Writer(path, description) as writer:
            writer.add(batch)
    journal = (path / "journal.jsonl").read_bytes()
    before = (path / "data-000000").read_bytes()
    lines = journal.splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if b'{"batch"' in line)
    (path / "journal.jsonl").write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    with pytest.raises(DatasetError, match="its checksum is wrong"):
        Writer(path, description)
    (path / "journal.jsonl").write_bytes(journal)
    edit(path, lambda e: e.pop(number))  # With right checksums.
    with pytest.raises(DatasetError, match="a line was removed or changed"):
        Writer(path, description)
    assert (path / "data-000000").read_bytes() == before
    (path / "journal.jsonl").write_bytes(journal)
    with Writer(path, description) as writer:
        writer.add(data[3])
    dataset = open_dataset(path)
    assert all((a == b).all() for a, b in zip(dataset, data, strict=True))


def test_nothing_is_written_or_removed_through_links(
    recording: tuple[DatasetDescription, list[TensorDict]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description, data = recording
    path, precious = tmp_path / "d", tmp_path / "precious"
    precious.mkdir()
    (precious / "a").write_text("a")
    with Writer(path, description) as writer:
        writer.add(data[0])
    (path / "data-000001").symlink_to(precious / "a")
    (path / "data-000002").symlink_to(precious)
    with Writer(path, description) as writer:
        writer.add(data[1])
        monkeypatch.setattr(appending, "SEGMENT", 1)
        with pytest.raises(OSError, match="data-000001"):
            writer.add(data[2])
    assert len(open_dataset(path)) == 2
    for name in ("data-000000", "journal.jsonl"):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        size = (tmp_path / name).stat().st_size
        with pytest.raises(DatasetError, match=f"{name} is a symbolic link"):
            Writer(path, description)
        assert (tmp_path / name).stat().st_size == size
        (tmp_path / name).replace(path / name)
    assert [(p.name, p.read_text()) for p in precious.iterdir()] == [("a", "a")]
    (path / ".lock").unlink()
    (path / ".lock").symlink_to(precious / "made")
    with pytest.raises(OSError, match=r"\.lock"):
        Writer(path, description)
    assert not (precious / "made").exists()


def in_fork(work: Any) -> int:
    """Run ``work`` in a fork of this process; return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.forks
def test_a_fork_neither_holds_the_lock_nor_writes(
    recording: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    description, data = recording
    path = tmp_path / "d"
    writer = Writer(path, description)
    background = BackgroundWriter(writer)

    def child() -> None:
        with pytest.raises(ClosedError, match="this process is a fork"):
            writer.add(data[0])
        with pytest.raises(ClosedError, match="fork"):
            background.add(data[0])
        with pytest.raises(BlockingIOError):
            Writer(path, description)  # The parent holds the lock.
        background.close()  # Must neither remove the folder nor release the lock.
        with pytest.raises(BlockingIOError):
            Writer(path, description)

    assert in_fork(child) == 0
    with pytest.raises(BlockingIOError):
        Writer(path, description)
    background.add(data[0])

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # The child outlives the writer.
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        background.close()
        Writer(path, description).close()
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(pid, 0)
    assert len(open_dataset(path)) == 1


LEAVES_A_CHILD = """
import os, sys, signal
from pathlib import Path
from marl_collect.storage.files import FolderLock

lock = FolderLock(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""


def test_the_lock_of_a_killed_process_is_released_while_its_child_lives(
    tmp_path: Path,
) -> None:
    path = tmp_path / ".lock"
    with start_python("-c", LEAVES_A_CHILD, path) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        with pytest.raises(BlockingIOError, match="being written to"):
            FolderLock(path)
        program.kill()
        program.wait()
        os.kill(child, 0)
        FolderLock(path).close()
        os.kill(child, signal.SIGKILL)


def test_two_writers_do_not_share_a_lock_whose_file_was_removed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with FolderLock(path):
        path.unlink()
        with FolderLock(path), pytest.raises(BlockingIOError):
            FolderLock(path)


LIMITED = """
import os, resource, sys
from marl_collect import Collector
from marl_collect.errors import ClosedError
from marl_collect.storage import DatasetDescription, Writer
from workloads.counting import CountingEnv

collector = Collector(CountingEnv, frames_per_batch=4000, total_frames=8000)
with Writer(sys.argv[1], DatasetDescription("c", collector.description)) as writer:
    writer.add(collector.next())
    batch = collector.next().clone()
    limit = os.path.getsize(sys.argv[1] + "/data-000000") + 2000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        writer.add(batch)
    except OSError as error:
        print(error)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    try:
        writer.add(batch)
    except ClosedError as error:
        print(error)
"""


def test_a_file_size_limit_is_named_and_leaves_no_partial_batch(tmp_path: Path) -> None:
    process = run_python("-c", LIMITED, tmp_path / "d", check=True)
    assert "File too large" in process.stdout
    assert f"The batches before it are in {tmp_path / 'd'}" in process.stdout
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset.transitions[:]) == 4000
    assert len(dataset.trajectories) == dataset.contents.totals.episodes
    dataset.verify()
