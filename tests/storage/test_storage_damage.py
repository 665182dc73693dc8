"""A damaged file is an error that names it, or its data are right.

``make fuzz-storage`` tries more than the usual number, with other seeds.
"""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
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

from marl_collect.storage import DatasetError, copy
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.writer import Writer

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


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("where", ["files", "cache"])
def test_damage_is_an_error_or_does_not_matter(
    tmp_path: Path, where: str, part: int
) -> None:
    """Reading does not compare the cache with the files; ``verify`` does."""
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
    assert len(names) == (6 if where == "cache" else 2)
    errors = 0
    for trial in range(TRIALS):
        draw = random.Random(f"{where} {TRIALS} {part} {trial}")
        # With the times of the files, by which a cache knows them.
        shutil.copytree(origin, folder)
        name = draw.choice(names)
        damage(folder / damaged.relative_to(origin) / name, draw)
        try:
            dataset = open_dataset(folder)
            if where == "cache":
                dataset.verify()
            actual = read(dataset)
        except DatasetError as error:
            assert (name if where == "files" else str(folder)) in str(error)  # noqa: PT017
            errors += 1
        else:
            assert actual == expected, f"trial {trial}"
            assert dataset.trajectories.lengths.sum() == whole
        shutil.rmtree(folder)
    print(f"{TRIALS} damages to {where}, {errors} errors, 0 wrong")  # noqa: T201 - for make fuzz-storage
    assert errors > TRIALS // (2 if where == "files" else 4)


@pytest.mark.parametrize("kind", ["records", "large", "index", "order", "episodes"])
@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_a_cache_without_one_of_its_files_is_built_again(
    tmp_path: Path, kind: str, is_empty: bool, grows: bool
) -> None:
    expected = write_two(tmp_path)
    open_dataset(tmp_path)
    (path,) = (tmp_path / ".cache").glob(f"*.{kind}*")
    path.unlink()
    if is_empty and not path.name.endswith(".npy"):
        path.touch()
    if grows:
        write(tmp_path, [batch := Stream(7, extras=EXTRAS).batch()])
        expected += frames_of(batch)
    dataset = open_dataset(tmp_path)
    assert read(dataset) == expected
    dataset.verify()


def rewritten(path: Path, change: Any) -> None:
    """Replace a file by another one that Parquet's readers accept."""
    pq.write_table(change(pq.read_table(path)), path)


def about(old: bytes, new: bytes) -> Any:
    """Return a function that changes the metadata of a table."""

    def change(t: pa.Table) -> pa.Table:
        entries = t.schema.metadata.items()
        return t.replace_schema_metadata({k: v.replace(old, new) for k, v in entries})

    return change


def field(key: bytes, value: bytes) -> Any:
    """Return a function that changes what a table says about observations."""

    def change(t: pa.Table) -> pa.Table:
        number = t.schema.get_field_index("g.observation")
        old = t.schema.field(number)
        new = old.with_metadata({**old.metadata, key: value})
        return t.cast(t.schema.set(number, new))

    return change


def values(name: str, make: Any = pa.nulls) -> Any:
    """Return a function that replaces a column; without ``make`` by nulls."""

    def change(t: pa.Table) -> pa.Table:
        number = t.schema.get_field_index(name)
        old = t.schema.field(number)
        return t.set_column(number, old, make(len(t), old.type))

    return change


HOSTILE = {
    "no description": lambda t: t.replace_schema_metadata(None),
    "another entry": about(b"description", b"descriptioN"),
    "no JSON": about(b"}", b""),
    "another version": about(b'"version": 1', b'"version": 99'),
    "no run": about(b'"run"', b'"ruN"'),
    "a huge shape": field(b"shape", b"[2, 9999999999999]"),
    "a negative shape": field(b"shape", b"[-1]"),
    "a wrong dtype": field(b"dtype", b"float64"),
    "no dtype": field(b"dtype", b"os.system"),
    "another key": field(b"key", b'["g", "observatioN"]'),
    "no text": field(b"dtype", b"\xfffloat32"),
    "a path as key": field(b"key", b'["..", "x"]'),
    "large frames that are short": values(
        "g.image", lambda n, kind: pa.array([b"x"] * n, kind)
    ),
    "no trajectories": lambda t: t.drop_columns(["collector.traj_ids"]),
    "no frames": lambda t: t.slice(0, 0),
    "a null at the end": values("next.g.reward"),
    "a null at the root": values("frame"),
    "runs without a name": values("run"),
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
    rewritten(path, HOSTILE[kind])
    with pytest.raises(DatasetError, match=path.name):
        open_dataset(tmp_path)
    for path in (tmp_path / ".cache").glob("*"):
        assert path.stat().st_size < 10_000_000


def test_builds_that_fail_leave_nothing(tmp_path: Path) -> None:
    write_two(tmp_path)
    path = max(tmp_path.glob("*.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    for _ in range(3):
        with pytest.raises(DatasetError, match=path.name):
            open_dataset(tmp_path)
        assert {p.name for p in (tmp_path / ".cache").iterdir()} <= {".lock"}


def test_files_of_others_are_named(tmp_path: Path) -> None:
    write_two(folder := tmp_path / "data")
    first, last = sorted(folder.glob("*.parquet"))
    uses: Any = {
        "open": open_dataset,
        "copy": lambda path: copy(path, tmp_path / "copy"),
        "write": lambda path: Writer(path, ABOUT),
    }
    content = last.read_bytes()
    last.unlink()
    os.mkfifo(last)
    for use in uses.values():
        with pytest.raises(DatasetError, match=f"{last.name} is not a file"):
            use(folder)
    last.unlink()
    no_time = folder / "99999999-999999-999999-00000000.000000-000000.parquet"
    no_time.write_bytes(content)
    with pytest.raises(DatasetError, match=no_time.name):
        uses["write"](folder)
    no_time.rename(folder / "mine.parquet")
    for use in uses.values():
        with pytest.raises(DatasetError, match=r"mine\.parquet is not a file of a da"):
            use(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="not a folder of a dataset"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError):
        open_dataset(first)
    with pytest.raises(FileNotFoundError, match="no batches"):
        open_dataset(tmp_path / "empty")
