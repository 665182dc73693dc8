"""A writer writes only to the folder that it opened, and is the only one there."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.scripts import run_python, start_python
from tensordict import TensorDict

from marl_collect import Collector, open_dataset
from marl_collect.errors import ClosedError
from marl_collect.storage import BackgroundWriter, DatasetDescription, Writer
from marl_collect.storage.files import FolderLock
from marl_collect.testing.counting import CountingEnv


@pytest.fixture(scope="module")
def collected() -> tuple[DatasetDescription, list[TensorDict]]:
    collector = Collector([CountingEnv] * 2, frames_per_batch=20, total_frames=80)
    description = DatasetDescription("counting", collector.description)
    return description, [batch.clone() for batch in collector]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_chdir_does_not_move_the_writer(
    collected: tuple[DatasetDescription, list[TensorDict]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description, data = collected
    other = tmp_path / "sub" / "d"
    monkeypatch.chdir(tmp_path)
    writer = Writer("d", description)
    writer.add(data[0])
    with Writer(other, description) as own:
        own.add(data[3])
    monkeypatch.chdir(tmp_path / "sub")
    writer.add(data[1])
    writer.close()
    assert len(open_dataset(tmp_path / "d")) == 2
    assert len(open_dataset(other)) == 1
    assert writer.path == tmp_path / "d"


def test_a_folder_in_place_of_the_writers_is_not_written_to(
    collected: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    description, data = collected
    path, moved = tmp_path / "d", tmp_path / "moved"
    with Writer(path, description) as writer:
        writer.add(data[0])
        path.rename(moved)
        with pytest.raises(FileNotFoundError, match="moved, removed or replaced"):
            writer.add(data[1])
        assert not path.exists()
        path.mkdir()
        (path / "thesis.tex").write_text("precious")
        with pytest.raises(FileNotFoundError, match="moved, removed or replaced"):
            writer.add(data[1])
        assert names(path) == {"thesis.tex"}
        (path / "thesis.tex").unlink()
        path.rmdir()
        moved.rename(path)  # After it is moved back, writing continues.
        for batch in data[1:3]:
            writer.add(batch)
    dataset = open_dataset(path)
    assert all((a == b).all() for a, b in zip(dataset, data[:3], strict=True))
    assert dataset.contents.totals.episodes == len(dataset.trajectories)


def test_closing_does_not_remove_a_folder_in_place_of_its_own(
    collected: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "d", collected[0])
    (tmp_path / "d").rename(tmp_path / "moved")
    with Writer(tmp_path / "d", collected[0]) as other:
        writer.close()
        other.add(collected[1][0])
    assert len(open_dataset(tmp_path / "d")) == 1


def test_appending_after_an_index_entry_was_removed_deletes_no_listed_batch(
    collected: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    description, data = collected
    path = tmp_path / "d"
    for batch in data[:3]:  # One run each.
        with Writer(path, description) as writer:
            writer.add(batch)
    index = json.loads((path / "index.json").read_text())
    gone = index["batches"].pop(0)
    index["checksum"] = None
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="Was an entry removed or changed by hand"):
        Writer(path, description)
    assert {f"batch-00000{i}" for i in range(3)} < names(path)
    for name in ("frames", "nbytes", "episodes"):
        index["totals"][name] -= gone[name]
    (path / "index.json").write_text(json.dumps(index))
    with Writer(path, description) as writer:
        writer.add(data[3])
    dataset = open_dataset(path)
    assert [e.name for e in dataset.contents.batches] == [
        "batch-000001",
        "batch-000002",
        "batch-000003",
    ]
    assert all((a == b).all() for a, b in zip(dataset, data[1:], strict=True))


def test_nothing_is_written_or_removed_through_links(
    collected: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    description, data = collected
    path, precious = tmp_path / "d", tmp_path / "precious"
    precious.mkdir()
    (precious / "a").write_text("a")
    with Writer(path, description) as writer:
        writer.add(data[0])
        (path / "index.json.new").symlink_to(precious / "a")
        (path / ".incomplete").symlink_to(precious)
        (path / "batch-000001").symlink_to(precious)
        writer.add(data[1])
    (path / "batch-000077").symlink_to(precious)
    (path / "batch-000078").write_text("a file")
    with Writer(path, description) as writer:
        writer.add(data[2])
    assert len(open_dataset(path)) == 3
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


def test_a_fork_neither_holds_the_lock_nor_writes(
    collected: tuple[DatasetDescription, list[TensorDict]], tmp_path: Path
) -> None:
    description, data = collected
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
import resource, sys
from marl_collect import Collector
from marl_collect.storage import DatasetDescription, Writer
from marl_collect.testing.counting import CountingEnv

collector = Collector(CountingEnv, frames_per_batch=4000, total_frames=8000)
with Writer(sys.argv[1], DatasetDescription("c", collector.description)) as writer:
    writer.add(collector.next())
    batch = collector.next().clone()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        writer.add(batch)
    except OSError as error:
        print(error)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    writer.add(batch)
"""


def test_a_file_size_limit_is_named_and_leaves_no_partial_batch(tmp_path: Path) -> None:
    done = run_python("-c", LIMITED, tmp_path / "d", check=True)
    assert "ulimit -f" in done.stdout
    assert str(tmp_path / "d") in done.stdout
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset.transitions[:]) == 8000
    assert len(dataset.trajectories) == dataset.contents.totals.episodes
