"""A folder has one holder of its lock, whatever happens to processes and files."""

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.scripts import start_python

from marl_collect.files.locks import FolderLock

LEAVES_A_CHILD = """
import os, sys, signal
from pathlib import Path
from marl_collect.files.locks import FolderLock

lock = FolderLock(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.processes
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


@pytest.mark.processes
@pytest.mark.forks
def test_a_fork_neither_holds_nor_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with FolderLock(path) as lock:
        pid = os.fork()
        if pid == 0:
            lock.close()
            os._exit(int(lock.held))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert lock.held
        with pytest.raises(BlockingIOError):
            FolderLock(path)
    FolderLock(path).close()


def test_two_holders_do_not_share_a_lock_whose_file_was_removed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with FolderLock(path):
        path.unlink()
        with FolderLock(path), pytest.raises(BlockingIOError):
            FolderLock(path)


def test_a_file_that_is_removed_before_it_is_locked_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / ".lock", fcntl.flock

    def removed_before(file: Any, operation: int) -> None:
        monkeypatch.undo()
        path.unlink()  # By its last holder.
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with FolderLock(path), pytest.raises(BlockingIOError):
        FolderLock(path)


def test_nobody_else_can_open_a_lock(tmp_path: Path) -> None:
    """Who can open a file can lock it, and so block its owner."""
    path = tmp_path / ".lock"
    before = os.umask(0)
    try:
        for _ in range(2):
            with FolderLock(path):
                assert path.stat().st_mode & 0o777 == 0o600
            path.chmod(0o644)
    finally:
        os.umask(before)


def test_a_lock_is_not_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match=r"\.lock"):
        FolderLock(tmp_path / ".lock")
    assert not (tmp_path / "made").exists()
