"""A process is killed before and after every change that it makes on disk.

What was acknowledged is there afterwards, bit by bit, and nothing that is wrong.
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

import numpy as np
import torch
from storage_streams import ENVIRONMENT, Frame, Stream, flat_frames, frames_of

from marl_collect.storage import DatasetDescription
from marl_collect.storage import writer as writing
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.writer import Writer

ABOUT = DatasetDescription("stream", ENVIRONMENT)
CALLS = ("fsync", "rename", "replace", "unlink", "utime", "open")
"""Functions of ``os`` that change what is on disk."""
BATCHES = 11


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


def read(folder: Path) -> list[Frame]:
    dataset = open_dataset(folder)
    return flat_frames(dataset[np.arange(len(dataset))])


def add_batches(folder: Path, pipe: int) -> None:
    stream = Stream(5)
    with Writer(folder, ABOUT) as writer:
        for _ in range(BATCHES):
            writer.add(stream.batch())
            os.write(pipe, b"+")


def build_cache(folder: Path, _pipe: int) -> None:
    open_dataset(folder)


@pytest.mark.forks
@pytest.mark.parametrize("after", [False, True])
def test_a_killed_writer_loses_no_acknowledged_batch(
    tmp_path: Path, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MOST_PARTS", 3)
    stream = Stream(5)
    frames = [frames_of(stream.batch()) for _ in range(BATCHES)]
    died, call = True, 0
    while died:
        folder = tmp_path / f"data-{call}"
        died, text = in_fork(partial(add_batches, folder), call, after=after)
        acknowledged = len(text)
        if acknowledged or list(folder.glob("[!.]*.parquet")):
            found = read(folder)
            # The batch that was being written may be there, as a whole.
            counts = [12 * n for n in (acknowledged, acknowledged + 1)]
            assert len(found) in counts
            expected = [frame for batch in frames for frame in batch]
            assert found == expected[: len(found)]
            with Writer(folder, ABOUT) as writer:
                writer.add(Stream(6).batch())
            assert read(folder) == found + frames_of(Stream(6).batch())
            assert len(list(folder.glob("[!.]*.parquet"))) <= 1 + BATCHES
        call += 1
    assert acknowledged == BATCHES
    assert call > 40


@pytest.mark.forks
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", ["nothing", "a part", "another dataset"])
def test_a_killed_reader_leaves_no_wrong_cache(
    tmp_path: Path, after: bool, before: str
) -> None:
    # Large frames that, compressed, are smaller than the buffer of a file.
    stream = Stream(1, extras={"image": (torch.bool, (40, 60))})
    model: list[Frame] = []
    origin = tmp_path / "origin"
    with Writer(origin, ABOUT) as writer:
        writer.add(batch := stream.batch())
        model += frames_of(batch)
        if before == "another dataset":
            open_dataset(origin)
            shutil.rmtree(origin)
            os.mkdir(origin)
            model = []
    with Writer(origin, ABOUT) as writer:
        if before == "a part":
            open_dataset(origin)
        writer.add(batch := stream.batch())
        model += frames_of(batch)
    died, call = True, 0
    while died:
        folder = tmp_path / f"data-{call}"
        shutil.copytree(origin, folder)
        died, _ = in_fork(partial(build_cache, folder), call, after=after)
        for _ in range(2):
            assert read(folder) == model
        with Writer(folder, ABOUT) as writer:
            writer.add(extra := Stream(2, extras=stream.extras).batch())
        assert read(folder) == model + frames_of(extra)
        shutil.rmtree(folder)
        call += 1
    assert call > 8
