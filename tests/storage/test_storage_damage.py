"""A damaged file is an error that names it, or its data are right.

``make fuzz-storage`` tries more than the usual number, with other seeds.
"""

import os
import random
import shutil
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
    read,
    write,
)

from marl_collect.storage import DatasetError, Writer, copy, open_dataset

PARTS = 4
TRIALS = int(os.environ.get("MARL_COLLECT_DAMAGES", "200")) // PARTS
EXTRAS: dict[str, Any] = {
    "image": (torch.uint8, (40, 36, 3)),
    "half": (torch.bfloat16, (2,)),
}


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


def test_files_of_others_are_named(tmp_path: Path) -> None:
    write_two(folder := tmp_path / "data")
    first, last = sorted(folder.glob("*.parquet"))
    writer, copied = partial(Writer, description=ABOUT), tmp_path / "copy"
    uses = open_dataset, writer, partial(copy, target=copied)

    def refused(place: Path, error: Any, message: str, *by: Any) -> None:
        for use in by:
            with pytest.raises(error, match=message):
                use(place)

    content = last.read_bytes()
    last.unlink()
    os.mkfifo(last)
    refused(folder, DatasetError, f"{last.name} is not a file", *uses)
    last.unlink()
    no_time = folder / "99999999-999999-999999-00000000.000000-000000.parquet"
    no_time.write_bytes(content)
    refused(folder, DatasetError, no_time.name, writer)
    no_time.rename(folder / "mine.parquet")
    refused(folder, DatasetError, r"mine\.parquet is not a file of a da", *uses)
    refused(first, NotADirectoryError, "is not a folder", open_dataset)
    refused(first, NotADirectoryError, "is a file", writer)
    missing = "not a folder of a dataset"
    refused(tmp_path / "nowhere", FileNotFoundError, missing, open_dataset)
    (empty := tmp_path / "empty").mkdir()
    refused(empty, FileNotFoundError, "no batches", open_dataset)
    (empty / "thesis.tex").touch()
    message = r"holds no dataset, but thesis\.tex"
    refused(empty, FileExistsError, message, writer, partial(copy, folder))
    assert os.listdir(empty) == ["thesis.tex"]
    assert not copied.exists()
