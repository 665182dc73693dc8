"""A process is killed before and after every change that it makes on disk.

What was acknowledged is there afterwards, bit by bit, and nothing that is wrong. A kill
leaves what was written in the page cache, so nothing waits for the disk here.
``make fuzz-storage`` kills more than two hundred times.
"""

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import torch
from storage_streams import ABOUT, Stream, frames_of, read, write

from marl_collect.storage import copy
from marl_collect.storage import writer as writing
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.writer import Writer

pytestmark = pytest.mark.processes

CALLS = ("fsync", "rename", "replace", "unlink", "utime", "open")
"""Functions of ``os`` that change what is on disk."""
BATCHES, FRAMES = 11 if "MARL_COLLECT_DAMAGES" in os.environ else 5, 3
AFTER = pytest.mark.parametrize("after", [False, True])


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join after few batches, and do not wait for the disk."""
    monkeypatch.setattr(writing, "_MOST_PARTS", 3)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def die_at(call: int, *, after: bool) -> Callable[[], int]:
    """Let this process kill itself at a call; return a counter of the calls."""
    count = 0

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            is_last = count - 1 == call
            if is_last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **keywords)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))
    return lambda: count


def in_fork(work: Callable[[int], None], call: int, *, after: bool) -> tuple[bool, str]:
    """Run ``work(pipe)`` in a fork that dies at a call.

    Returns:
        Whether it died, and what it wrote into the pipe.
    """
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receive)
            die_at(call, after=after)
            work(send)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the fork must end
            traceback.print_exc()
            os._exit(1)
    os.close(send)
    with os.fdopen(receive) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), "the fork failed"
    return status != 0, text


def add_batches(folder: Path, pipe: int) -> None:
    with Writer(folder, ABOUT) as writer:
        for batch in Stream(5).batches(BATCHES, FRAMES):
            writer.add(batch)
            os.write(pipe, b"+")


def build_cache(folder: Path, _pipe: int) -> None:
    open_dataset(folder)


def copy_files(origin: Path, target: Path, _pipe: int) -> None:
    copy(origin, target)


@pytest.mark.forks
@AFTER
def test_a_killed_writer_loses_no_acknowledged_batch(
    tmp_path: Path, after: bool
) -> None:
    frames = frames_of(*Stream(5).batches(BATCHES, FRAMES))
    more = Stream(6).batch()
    died, kills = True, 0
    while died:
        folder = tmp_path / f"data-{kills}"
        died, text = in_fork(partial(add_batches, folder), kills, after=after)
        acknowledged = len(text)
        if acknowledged or list(folder.glob("[!.]*.parquet")):
            actual = read(folder)
            # The batch that was being written may be there, as a whole.
            assert len(actual) // 2 // FRAMES in (acknowledged, acknowledged + 1)
            assert actual == frames[: len(actual)]
            write(folder, [more])
            assert read(folder) == actual + frames_of(more)
            assert len(list(folder.glob("[!.]*.parquet"))) <= 1 + BATCHES
        kills += died
    print(f"{kills} kills of a writer, 0 wrong")  # noqa: T201 - for make fuzz-storage
    assert acknowledged == BATCHES
    assert kills > 6 * BATCHES


@pytest.mark.forks
@AFTER
@pytest.mark.parametrize(
    "before", ["nothing", "a part", "another dataset", "more", "what is deleted"]
)
def test_a_killed_reader_leaves_no_wrong_cache(
    tmp_path: Path, after: bool, before: str
) -> None:
    # Large frames that, compressed, are smaller than the buffer of a file.
    stream = Stream(1, extras={"image": (torch.bool, (40, 60))})
    batches = stream.batches(2)
    origin = tmp_path / "origin"
    write(origin, batches[:1])
    if before != "nothing":
        open_dataset(origin)
    write(origin, batches[1:])
    if before == "another dataset":
        min(origin.glob("*.parquet")).unlink()
        del batches[0]
    elif before == "more":  # What the first file holds is copied.
        open_dataset(origin)
        max(origin.glob("*.parquet")).unlink()
        del batches[1]
    elif before == "what is deleted":  # Meanwhile, behind the first file.
        del batches[1]
    expected, more = frames_of(*batches), stream.batch()
    died, kills = True, 0
    while died:
        folder = tmp_path / "data"
        shutil.copytree(origin, folder)
        died, _ = in_fork(partial(build_cache, folder), kills, after=after)
        if before == "what is deleted":
            max(folder.glob("*.parquet")).unlink()
        for _ in range(2):
            assert read(folder) == expected
        write(folder, [more])
        assert read(folder) == expected + frames_of(more)
        open_dataset(folder).verify()
        shutil.rmtree(folder)
        kills += died
    print(f"{kills} kills of a reader, 0 wrong")  # noqa: T201 - for make fuzz-storage
    assert kills > 8


@pytest.mark.forks
@AFTER
def test_a_killed_copy_is_a_dataset_and_goes_on(tmp_path: Path, after: bool) -> None:
    origin = tmp_path / "origin"
    for seed in range(3):
        write(origin, [Stream(seed).batch(1)])
    frames = read(origin)
    died, kills = True, 0
    while died:
        target = tmp_path / f"data-{kills}"
        died, _ = in_fork(partial(copy_files, origin, target), kills, after=after)
        if list(target.glob("[!.]*.parquet")):
            found = read(target)
            assert found == frames[: len(found)]
        copy(origin, target)
        assert read(target) == frames
        kills += died
    print(f"{kills} kills of a copy, 0 wrong")  # noqa: T201 - for make fuzz-storage
    assert kills > 5
