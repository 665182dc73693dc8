"""Files and folders appear whole, have one writer, and describe spaces."""

import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.scripts import run_python, start_python

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.files.atomic import write_atomically
from marl_collect.files.description_json import (
    environment_from_json,
    environment_to_json,
    space_from_json,
    space_to_json,
)
from marl_collect.files.folders import completed
from marl_collect.files.locks import FolderLock

MANY = """
import sys
from pathlib import Path
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.files.atomic import write_atomically

for _ in range(100):
    write_atomically(Path(sys.argv[1]), sys.argv[2] * 100_000)
"""

STOPPED = """
import os, sys
from pathlib import Path
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.files.atomic import write_atomically

sync = os.fsync

def stop(descriptor):
    os.fsync = sync
    print("written", flush=True)
    sys.stdin.readline()

os.fsync = stop
write_atomically(Path(sys.argv[1]), "theirs")
"""


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "tëxt")
    assert path.read_bytes() == "tëxt".encode()
    write_atomically(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert os.listdir(tmp_path) == ["file"]


def test_a_pipe_or_a_device_stays_what_it_is(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)  # As /dev/stdout is.
    for path in (pipe, link):
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        write_atomically(path, "a text")
        assert os.read(reader, 100) == b"a text"
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [link, pipe]


@pytest.mark.processes
def test_processes_that_write_the_same_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    programs = [start_python("-c", MANY, path, letter) for letter in "abc"]
    letters = set()
    while any(program.poll() is None for program in programs):
        if path.exists():
            content = path.read_text()
            assert content in ("a" * 100_000, "b" * 100_000, "c" * 100_000)
            letters.add(content[0])
    for program in programs:
        _, errors = program.communicate()
        assert program.wait() == 0, errors
    assert letters
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.processes
def test_a_file_that_another_process_writes_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with start_python("-c", STOPPED, path, stdin=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "written\n"
        write_atomically(path, "ours")
        assert path.read_text() == "ours"
        _, errors = program.communicate("\n")
    assert program.wait() == 0, errors
    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.processes
def test_the_next_write_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path, other = tmp_path / "a[b]", tmp_path / "other"
    code = STOPPED.replace("sys.stdin.readline()", "os.kill(os.getpid(), 9)")
    for target in (path, other):
        target.write_text("before")
        process = run_python("-c", code, target)
        assert process.returncode == -signal.SIGKILL
        assert target.read_text() == "before"
    assert len(os.listdir(tmp_path)) == 4
    write_atomically(path, "after")
    assert path.read_text() == "after"
    (leftover,) = set(os.listdir(tmp_path)) - {"a[b]", "other"}
    assert leftover.startswith(".other.")


def test_an_error_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")

    def fail(_descriptor: int) -> None:
        raise OSError("The disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="The disk is full"):
            write_atomically(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def write(target: Path, error: BaseException | None = None) -> None:
    with completed(target, "write") as path:
        path.mkdir()
        (path / "a").touch()
        assert not target.exists()
        if error is not None:
            raise error


def test_an_error_leaves_nothing_and_what_exists_stays(tmp_path: Path) -> None:
    target = tmp_path / "new" / "d"
    with pytest.raises(KeyboardInterrupt):
        write(target, KeyboardInterrupt())
    assert not list(tmp_path.iterdir())
    write(target)
    with pytest.raises(FileExistsError, match="d exists: write to a path that does"):
        write(target)
    assert [path.name for path in target.iterdir()] == ["a"]


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes").touch()
    (tmp_path / ".d.incomplete").symlink_to(precious)
    write(tmp_path / "d")
    assert {path.name for path in tmp_path.iterdir()} == {"d", "precious"}
    assert [path.name for path in precious.iterdir()] == ["notes"]


@pytest.mark.processes
def test_what_a_killed_process_left_is_removed_unless_another_one_writes(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from marl_collect.files.folders import completed\n"
        "with completed(Path(sys.argv[1]), 'write') as path:\n"
        "    path.mkdir(); (path / 'half').touch(); os.kill(os.getpid(), 9)"
    )
    target, hidden = tmp_path / "d", tmp_path / ".d.incomplete"
    killed = run_python("-c", code, target)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (hidden / "d" / "half").exists()
    with (hidden / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="is being written to by another"):
            write(target)
    assert not target.exists()
    write(target)
    assert [path.name for path in target.iterdir()] == ["a"]
    assert not hidden.exists()


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


SPACES: list[Any] = [
    spaces.Box(-np.inf, np.inf, (31,), np.float32),
    spaces.Box(0, 255, (4, 5, 3), np.uint8),
    spaces.Box(
        np.array([0.0, -np.inf, -1.5], np.float32),
        np.array([0.1, 3.0, np.inf], np.float32),
    ),
    spaces.Box(-(2**62) - 1, 2**62 + 1, (2,), np.int64),
    spaces.Box(np.float32(0.1), np.float32(0.3), (), np.float32),
    spaces.Box(0, 1, (2, 0), np.uint8),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [2, -3]])),
    spaces.MultiDiscrete(np.array([2, 3]), np.dtype(np.int32)),
    spaces.Discrete(3, start=2, dtype=np.int32),
    spaces.MultiBinary([2, 2]),
    spaces.Dict(
        b=spaces.Discrete(2), a=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1)])
    ),
]


def test_a_description_survives_the_round_trip() -> None:
    groups = {
        f"group_{k}": GroupDescription(
            agents=tuple(f"agent_{k}_{row}" for row in range(k)),
            observation=space,
            action=SPACES[-1 - k] if k % 3 else spaces.Discrete(2),
            categorical_actions=k % 3 > 0,
            action_mask=k % 3 == 0,
            mask=k % 2 == 0,
            info={"speed": (k, 2), "luck": ()} if k % 4 else {},
            episode_reward=k % 4 < 2,
        )
        for k, space in enumerate(SPACES)
    }
    root = {"state": SPACES[0], "map": SPACES[-1]}
    for k, limit in enumerate([None, 7]):
        described = EnvDescription(
            "drawn", groups, root, done_on_any=k == 0, repeats=k == 1, time_limit=limit
        )
        text = json.dumps(environment_to_json(described), allow_nan=False)
        assert environment_from_json(json.loads(text)) == described


def test_the_bounds_of_an_image_are_written_once() -> None:
    space = spaces.Box(0, 255, (88, 88, 3), np.uint8)
    assert len(json.dumps(space_to_json(space))) < 200


def test_a_space_whose_values_are_not_arrays_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be stored"):
        space_to_json(spaces.Text(5))
    with pytest.raises(ValueError, match="Unknown kind of space"):
        space_from_json({"kind": "Graph"})
