"""A damaged file is an error that names it, or its data are right.

``MARL_COLLECT_DAMAGES=3000 pytest tests/storage/test_storage_damage.py`` tries
more than the usual number, with other seeds.
"""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from storage_streams import (
    ENVIRONMENT,
    Stream,
    complete_episodes,
    flat_frames,
    frames_of,
)

from marl_collect.storage import DatasetDescription, DatasetError, copy
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.writer import Writer

ABOUT = DatasetDescription("stream", ENVIRONMENT)
TRIALS = int(os.environ.get("MARL_COLLECT_DAMAGES", "200"))
EXTRAS: dict[str, Any] = {
    "image": (torch.uint8, (40, 36, 3)),
    "half": (torch.bfloat16, (2,)),
}


def write(folder: Path) -> list[Any]:
    for seed in (0, 1):
        stream = Stream(seed, extras=EXTRAS)
        with Writer(folder, ABOUT) as writer:
            for _ in range(2):
                writer.add(stream.batch(4))
    dataset = open_dataset(folder)
    frames = flat_frames(dataset[np.arange(len(dataset))])
    shutil.rmtree(folder / ".cache")
    return frames


def damage(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if draw.random() < 0.3:  # The footer is small but has everything in it.
        at = len(content) - 1 - draw.randrange(min(len(content), 6000))
    kind = draw.choice(["flip", "flip", "flip", "zeros", "cut", "extend", "noise"])
    if kind == "flip":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "zeros":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif kind == "cut":
        del content[at:]
    elif kind == "extend":
        content += draw.randbytes(100)
    else:
        content[at : at + 4] = draw.randbytes(len(content[at : at + 4]))
    path.write_bytes(content)


@pytest.mark.parametrize("part", range(4))
def test_verify_finds_damage_inside_the_cache(tmp_path: Path, part: int) -> None:
    """Reading does not compare the cache with the files; ``verify`` does."""
    origin = tmp_path / "origin"
    expected = write(origin)
    dataset = open_dataset(origin)
    _ = dataset.statistics, dataset.transitions.moments("g")
    names = sorted(p.name for p in (origin / ".cache").iterdir() if p.stat().st_size)
    assert len(names) == 8
    errors = 0
    for trial in range(TRIALS // 4):
        draw = random.Random(f"cache {TRIALS} {part} {trial}")
        folder = tmp_path / "data"
        # With the times of the files, by which a cache knows them.
        shutil.copytree(origin, folder)
        damage(folder / ".cache" / draw.choice(names), draw)
        try:
            dataset = open_dataset(folder)
            dataset.verify()
        except DatasetError as error:
            assert str(folder) in str(error)  # noqa: PT017
            errors += 1
        else:
            read = flat_frames(dataset[np.arange(len(dataset))])
            assert read == expected, f"trial {trial}"
            assert dataset.trajectories.lengths.sum() == lengths(expected)
        shutil.rmtree(folder)
    assert errors > TRIALS // 4 // 4


@pytest.mark.parametrize("kind", ["records", "large", "index", "order", "episodes"])
@pytest.mark.parametrize("size", [None, 0])
@pytest.mark.parametrize("grows", [False, True])
def test_a_cache_without_one_of_its_files_is_built_again(
    tmp_path: Path, kind: str, size: int | None, grows: bool
) -> None:
    expected = write(tmp_path)
    open_dataset(tmp_path)
    (path,) = (tmp_path / ".cache").glob(f"*.{kind}*")
    path.unlink()
    if size is not None and not path.name.endswith(".npy"):
        path.write_bytes(bytes(size))
    if grows:
        with Writer(tmp_path, ABOUT) as writer:
            writer.add(batch := Stream(7, extras=EXTRAS).batch())
        expected += frames_of(batch)
    dataset = open_dataset(tmp_path)
    assert flat_frames(dataset[np.arange(len(dataset))]) == expected
    dataset.verify()


def lengths(frames: list[Any]) -> int:
    """Return the number of frames of complete episodes of both runs."""
    runs = frames[: len(frames) // 2], frames[len(frames) // 2 :]
    episodes = [e for run in runs for e in complete_episodes(run).values()]
    return sum(map(len, episodes))


@pytest.mark.parametrize("part", range(4))
def test_damage_is_an_error_or_does_not_matter(tmp_path: Path, part: int) -> None:
    origin = tmp_path / "origin"
    expected = write(origin)
    names = sorted(path.name for path in origin.iterdir())
    assert len(names) == 2
    errors = 0
    for trial in range(TRIALS // 4):
        draw = random.Random(f"{TRIALS} {part} {trial}")
        folder = tmp_path / "data"
        shutil.copytree(origin, folder)
        name = draw.choice(names)
        damage(folder / name, draw)
        error = ""
        try:
            dataset = open_dataset(folder)
            found = flat_frames(dataset[np.arange(len(dataset))])
        except DatasetError as raised:
            error = str(raised)
        if error:
            assert name in error
            errors += 1
        else:
            assert found == expected, f"trial {trial}"
        shutil.rmtree(folder)
    assert errors > TRIALS // 4 // 2


def rewritten(folder: Path, change: Any) -> None:
    """Replace a file by another one that Parquet's readers accept."""
    path = next(folder.glob("*.parquet"))
    pq.write_table(change(pq.read_table(path)), path)


def with_metadata(table: pa.Table, name: str, key: bytes, value: bytes) -> pa.Table:
    number = table.schema.get_field_index(name)
    field = table.schema.field(number)
    changed = field.with_metadata({**field.metadata, key: value})
    return table.cast(table.schema.set(number, changed))


HOSTILE = {
    "no description": lambda t: t.replace_schema_metadata(None),
    "no JSON": lambda t: t.replace_schema_metadata({"marl_collect": "{"}),
    "another version": lambda t: t.replace_schema_metadata(
        {"marl_collect": '{"version": 99}'}
    ),
    "no run": lambda t: t.replace_schema_metadata({"marl_collect": '{"version": 1}'}),
    "a huge shape": lambda t: with_metadata(
        t, "g.observation", b"shape", b"[2, 9999999999999]"
    ),
    "a negative shape": lambda t: with_metadata(t, "g.observation", b"shape", b"[-1]"),
    "a wrong dtype": lambda t: with_metadata(t, "g.observation", b"dtype", b"float64"),
    "no dtype": lambda t: with_metadata(t, "g.observation", b"dtype", b"os.system"),
    "another key": lambda t: with_metadata(
        t, "g.observation", b"key", b'["g", "observatioN"]'
    ),
    "no text": lambda t: with_metadata(t, "g.observation", b"dtype", b"\xfffloat32"),
    "a path as key": lambda t: with_metadata(
        t, "g.observation", b"key", b'["..", "x"]'
    ),
    "large frames that are short": lambda t: t.set_column(
        t.schema.get_field_index("g.image"),
        t.schema.field("g.image"),
        pa.array([b"x"] * len(t), pa.large_binary()),
    ),
    "no trajectories": lambda t: t.drop_columns(["collector.traj_ids"]),
    "no frames": lambda t: t.slice(0, 0),
    "a null at the end": lambda t: t.set_column(
        t.schema.get_field_index("next.g.reward"),
        t.schema.field("next.g.reward"),
        pa.nulls(len(t), t.schema.field("next.g.reward").type),
    ),
    "a null at the root": lambda t: t.set_column(
        t.schema.get_field_index("frame"),
        t.schema.field("frame"),
        pa.nulls(len(t), pa.int64()),
    ),
    "runs without a name": lambda t: t.set_column(
        0, t.schema.field(0), pa.nulls(len(t), t.schema.field(0).type)
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_says_something_impossible_is_refused(
    tmp_path: Path, kind: str
) -> None:
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(Stream(extras=EXTRAS).batch())
    rewritten(tmp_path, HOSTILE[kind])
    (name,) = [path.name for path in tmp_path.glob("*.parquet")]
    with pytest.raises(DatasetError, match=name):
        open_dataset(tmp_path)
    for path in (tmp_path / ".cache").glob("*"):
        assert path.stat().st_size < 10_000_000


@pytest.mark.parametrize("rows", [slice(None, None, 2), slice(None, None, -1)])
def test_rows_without_the_ones_behind_them_are_refused(
    tmp_path: Path, rows: slice
) -> None:
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(Stream(extras=EXTRAS).batch(10))
    rewritten(tmp_path, lambda t: t.take(np.arange(len(t))[rows]))
    with pytest.raises(DatasetError, match="a null too many"):
        open_dataset(tmp_path)


def test_builds_that_fail_leave_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    path = max(tmp_path.glob("*.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    for _ in range(3):
        with pytest.raises(DatasetError, match=path.name):
            open_dataset(tmp_path)
        assert {p.name for p in (tmp_path / ".cache").iterdir()} <= {".lock"}


def test_a_pipe_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data")
    name = sorted(p.name for p in (tmp_path / "data").glob("*.parquet"))[-1]
    (tmp_path / "data" / name).unlink()
    os.mkfifo(tmp_path / "data" / name)
    for use in (
        open_dataset,
        lambda path: copy(path, tmp_path / "copy"),
        lambda path: Writer(path, ABOUT),
    ):
        with pytest.raises(DatasetError, match=f"{name} is not a file"):
            use(tmp_path / "data")


def test_a_name_that_is_no_time_is_named(tmp_path: Path) -> None:
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(Stream().batch())
    (path,) = tmp_path.glob("*.parquet")
    wrong = "99999999-999999-999999-00000000.000000-000000.parquet"
    path.rename(tmp_path / wrong)
    with pytest.raises(DatasetError, match=wrong):
        Writer(tmp_path, ABOUT)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    big = Stream(extras={"image": (torch.uint8, (600, 600, 3))})
    with Writer(tmp_path, ABOUT) as writer:
        for _ in range(3):
            writer.add(big.batch(8))
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) == 3  # Large batches are not joined.
    files[1].unlink()
    with pytest.raises(DatasetError, match=r"lacks batch 1 of the run"):
        open_dataset(tmp_path)


def test_files_of_others_are_named(tmp_path: Path) -> None:
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(Stream().batch())
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match=r"mine\.parquet is not a file of a dataset"):
        open_dataset(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a folder of a dataset"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError):
        open_dataset(tmp_path / "mine.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no batches"):
        open_dataset(tmp_path / "empty")
