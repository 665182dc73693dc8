"""A process is killed before and after every change that it makes on disk.

What was acknowledged is there afterwards, bit by bit, and nothing that is wrong. A kill
leaves what was written in the page cache, so nothing waits for the disk here.
``make fuzz-storage`` kills more than two hundred times.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_streams import ABOUT, Stream, frames_of, killed, read, write

from marl_collect.storage import Writer, copy, open_dataset
from marl_collect.storage import writer as writing

BATCHES, FRAMES = 11 if "MARL_COLLECT_DAMAGES" in os.environ else 5, 3
pytestmark = [
    pytest.mark.processes,
    pytest.mark.forks,
    pytest.mark.parametrize("after", [False, True]),
]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join after few batches, and do not wait for the disk."""
    monkeypatch.setattr(writing, "_MOST_PARTS", 3)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def each_kill(
    root: Path,
    after: bool,
    least: int,
    work: Callable[[Path], Any],
    origin: Path | None = None,
) -> Iterator[Path]:
    """Yield folders, copies of ``origin``, in which ``work`` was killed ever later."""
    died, kills = True, 0
    while died:
        folder = root / f"data-{kills}"
        if origin is not None:
            shutil.copytree(origin, folder)
        died = killed(kills, after, work, folder)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
        kills += died
    print(f"{kills} kills, 0 wrong")  # noqa: T201 - for make fuzz-storage
    assert kills > least


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*.parquet"))


def test_a_killed_writer_loses_no_acknowledged_batch(
    tmp_path: Path, after: bool
) -> None:
    frames = frames_of(*Stream(5).batches(BATCHES, FRAMES))
    more, log = Stream(6).batch(), tmp_path / "log"

    def add_batches(folder: Path) -> None:
        log.write_text("")
        with Writer(folder, ABOUT) as writer:
            for batch in Stream(5).batches(BATCHES, FRAMES):
                writer.add(batch)
                with log.open("a") as file:
                    file.write("+")

    for folder in each_kill(tmp_path, after, 6 * BATCHES, add_batches):
        acknowledged = len(log.read_text())
        if acknowledged or parts(folder):
            actual = read(folder)
            # The batch that was being written may be there, as a whole.
            assert len(actual) // 2 // FRAMES in (acknowledged, acknowledged + 1)
            assert actual == frames[: len(actual)]
            write(folder, [more])
            assert read(folder) == actual + frames_of(more)
            assert len(parts(folder)) <= 1 + BATCHES
    assert acknowledged == BATCHES


@pytest.mark.parametrize(
    "before", ["nothing", "a part", "another dataset", "more", "what is deleted"]
)
def test_a_killed_reader_leaves_no_wrong_cache(
    tmp_path: Path, after: bool, before: str
) -> None:
    # Large frames that, compressed, are smaller than the buffer of a file.
    stream = Stream(1, extras={"image": (torch.bool, (40, 60))})
    batches, origin = stream.batches(2), tmp_path / "origin"
    write(origin, batches[:1])
    if before != "nothing":
        open_dataset(origin)
    write(origin, batches[1:])
    if before == "another dataset":
        parts(origin)[0].unlink()
        del batches[0]
    elif before == "more":  # What the first file holds is copied.
        open_dataset(origin)
        parts(origin)[1].unlink()
        del batches[1]
    elif before == "what is deleted":  # Meanwhile, behind the first file.
        del batches[1]
    expected, more = frames_of(*batches), stream.batch()
    for folder in each_kill(tmp_path, after, 8, open_dataset, origin):
        if before == "what is deleted":
            parts(folder)[1].unlink()
        for _ in range(2):
            assert read(folder) == expected
        write(folder, [more])
        assert read(folder) == expected + frames_of(more)
        open_dataset(folder).verify()


def test_a_killed_copy_is_a_dataset_and_goes_on(tmp_path: Path, after: bool) -> None:
    origin = tmp_path / "origin"
    for seed in range(3):
        write(origin, [Stream(seed).batch(1)])
    frames = read(origin)
    for target in each_kill(tmp_path, after, 15, partial(copy, origin)):
        if parts(target):
            found = read(target)
            assert found == frames[: len(found)]
        copy(origin, target)
        assert read(target) == frames
