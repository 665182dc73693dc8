"""Atomic changes to files, with several processes and kills."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.scripts import run_python, start_python

from marl_collect.files.atomic import write_atomically

pytestmark = pytest.mark.processes

MANY = """
import sys
from pathlib import Path
from marl_collect.files.atomic import write_atomically

for _ in range(100):
    write_atomically(Path(sys.argv[1]), sys.argv[2] * 100_000)
"""

STOPPED = """
import os, sys
from pathlib import Path
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
