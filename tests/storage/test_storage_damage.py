"""Damaged files are errors that name them or do not matter, and kills lose nothing.

A process is killed before and after every change that it makes on disk. What was
acknowledged is there afterwards, bit by bit, and nothing that is wrong. A kill leaves
what was written in the page cache, so nothing waits for the disk here. ``make
fuzz-storage`` tries more damages than usual, with other seeds, and more kills.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from storage_streams import (
    ABOUT,
    Frame,
    Stream,
    complete_episodes,
    damage,
    frames_of,
    killed,
    read,
    write,
)

from marl_collect.storage import DatasetError, Writer, copy, open_dataset
from marl_collect.storage import writer as writing

PARTS = 4
TRIALS = int(os.environ.get("MARL_COLLECT_DAMAGES", "200")) // PARTS
EXTRAS: dict[str, Any] = {
    "image": (torch.uint8, (40, 36, 3)),
    "half": (torch.bfloat16, (2,)),
}
BATCHES, FRAMES = 11 if "MARL_COLLECT_DAMAGES" in os.environ else 5, 3
MARKS = pytest.mark.processes, pytest.mark.forks
KILLED = pytest.mark.parametrize(
    "after", [pytest.param(when, marks=MARKS) for when in (False, True)]
)


def write_two(folder: Path) -> list[Frame]:
    """Write two runs, and return their frames."""
    batches = [Stream(seed, extras=EXTRAS).batches(frames=4) for seed in (0, 1)]
    for run in batches:
        write(folder, run)
    return frames_of(*batches[0], *batches[1])


def lose(path: Path, draw: random.Random) -> None:
    """Remove a file, or its content."""
    path.unlink()
    if path.suffix != ".npy" and draw.random() < 0.5:
        path.touch()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("where", ["files", "cache"])
def test_damage_is_an_error_or_does_not_matter(
    tmp_path: Path, where: str, part: int
) -> None:
    """Reading does not compare the cache with the files; ``verify`` does.

    A cache that lacks a file is built again. Some get a batch after the damage.
    """
    origin, folder = tmp_path / "origin", tmp_path / "data"
    expected = write_two(origin)
    runs = expected[: len(expected) // 2], expected[len(expected) // 2 :]
    whole = sum(len(e) for run in runs for e in complete_episodes(run).values())
    damaged = origin
    if where == "cache":
        open_dataset(origin)
        damaged = origin / ".cache"
    names = sorted(
        p.name for p in damaged.iterdir() if p.is_file() and p.stat().st_size
    )
    assert len(names) == (5 if where == "cache" else 2)
    errors, more = 0, Stream(7, extras=EXTRAS).batch()
    for trial in range(TRIALS):
        draw = random.Random(f"{where} {TRIALS} {part} {trial}")
        # With the times of the files, by which a cache knows them.
        shutil.copytree(origin, folder)
        name = draw.choice(names)
        path, frames = folder / damaged.relative_to(origin) / name, expected
        is_lost = where == "cache" and trial % 5 == 0
        (lose if is_lost else damage)(path, draw)
        if where == "cache" and trial % 2:
            write(folder, [more])
            frames = expected + frames_of(more)
        try:
            dataset = open_dataset(folder)
            if where == "cache":
                dataset.verify()
            actual = read(dataset)
        except DatasetError as error:
            assert not is_lost
            assert (name if where == "files" else str(folder)) in str(error)  # noqa: PT017
            errors += 1
        else:
            assert actual == frames, f"trial {trial}"
            if frames is expected:
                assert dataset.trajectories.lengths.sum() == whole
        shutil.rmtree(folder)
    print(f"{TRIALS} damages to {where}, {errors} errors, 0 wrong")  # noqa: T201 - for make fuzz-storage
    assert errors > TRIALS // (2 if where == "files" else 4)


def about(t: pa.Table, old: bytes, new: bytes) -> pa.Table:
    """Change the metadata of a table."""
    entries = t.schema.metadata.items()
    return t.replace_schema_metadata({k: v.replace(old, new) for k, v in entries})


def field(t: pa.Table, key: bytes, value: bytes) -> pa.Table:
    """Change what a table says about observations."""
    number = t.schema.get_field_index("g.observation")
    old = t.schema.field(number)
    new = old.with_metadata({**old.metadata, key: value})
    return t.cast(t.schema.set(number, new))


def values(t: pa.Table, name: str, make: Any = pa.nulls) -> pa.Table:
    """Replace a column; without ``make`` by nulls."""
    number = t.schema.get_field_index(name)
    old = t.schema.field(number)
    return t.set_column(number, old, make(len(t), old.type))


HOSTILE: dict[str, Any] = {
    "no description": lambda t: t.replace_schema_metadata(None),
    "another entry": lambda t: about(t, b"description", b"descriptioN"),
    "no JSON": lambda t: about(t, b"}", b""),
    "another version": lambda t: about(t, b'"version": 1', b'"version": 99'),
    "no run": lambda t: about(t, b'"run"', b'"ruN"'),
    "a huge shape": lambda t: field(t, b"shape", b"[2, 9999999999999]"),
    "a negative shape": lambda t: field(t, b"shape", b"[-1]"),
    "a wrong dtype": lambda t: field(t, b"dtype", b"float64"),
    "no dtype": lambda t: field(t, b"dtype", b"os.system"),
    "another key": lambda t: field(t, b"key", b'["g", "observatioN"]'),
    "no text": lambda t: field(t, b"dtype", b"\xfffloat32"),
    "a path as key": lambda t: field(t, b"key", b'["..", "x"]'),
    "large frames that are short": lambda t: values(
        t, "g.image", lambda n, kind: pa.array([b"x"] * n, kind)
    ),
    "no trajectories": lambda t: t.drop_columns(["collector.traj_ids"]),
    "no frames": lambda t: t.slice(0, 0),
    "a null at the end": lambda t: values(t, "next.g.reward"),
    "a null at the root": lambda t: values(t, "frame"),
    "runs without a name": lambda t: values(t, "run"),
    "half of the rows": lambda t: t.take(list(range(len(t)))[::2]),
    "rows in another order": lambda t: t.take(list(range(len(t)))[::-1]),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("which", [min, max])
def test_a_file_that_says_something_impossible_is_refused(
    tmp_path: Path, kind: str, which: Any
) -> None:
    write_two(tmp_path)
    path = which(tmp_path.glob("*.parquet"))
    pq.write_table(HOSTILE[kind](pq.read_table(path)), path)
    for _ in range(2):
        with pytest.raises(DatasetError, match=path.name):
            open_dataset(tmp_path)
    # A cache is complete, or nothing of it is left.
    left = {path.name: path.stat().st_size for path in tmp_path.glob(".cache/*")}
    assert "state.json" in left or left.keys() <= {".lock"}
    assert all(size < 10_000_000 for size in left.values())


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


@KILLED
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


@KILLED
@pytest.mark.parametrize(
    "before", ["nothing", "a part", "another dataset", "more", "what is deleted"]
)
def test_a_killed_reader_leaves_no_wrong_cache(
    tmp_path: Path, after: bool, before: str
) -> None:
    # Large frames that, compressed, are smaller than the buffer of a file.
    stream = Stream(1, extras={"image": (torch.bool, (40, 60))})
    batches, origin = stream.batches(3), tmp_path / "origin"
    write(origin, batches[:1])
    if before != "nothing":
        open_dataset(origin)
    write(origin, batches[1:])
    if before in ("another dataset", "more"):
        open_dataset(origin)
    if before == "another dataset":  # Before the file of joined batches.
        parts(origin)[0].unlink()
        del batches[0]
    elif before == "more":
        parts(origin)[1].unlink()
        del batches[1:]
    elif before == "what is deleted":  # Meanwhile, behind the first file.
        del batches[1:]
    expected, more = frames_of(*batches), stream.batch()
    for folder in each_kill(tmp_path, after, 8, open_dataset, origin):
        if before == "what is deleted":
            parts(folder)[1].unlink()
        for _ in range(2):
            assert read(folder) == expected
        write(folder, [more])
        assert read(folder) == expected + frames_of(more)
        open_dataset(folder).verify()


@KILLED
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
