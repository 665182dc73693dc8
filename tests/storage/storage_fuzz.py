"""Damages a dataset at random; every read must raise an error or give the right data.

A trial flips bits, cuts, extends or removes files, or puts links in their place, in
datasets with records and packed frames of several runs. They are read in each of
``FORMS``: from their folder, joined, copied, from an object store, and while they are
open. Lines at the end of a journal may be missing without an error, as after a crash:
the batches before them must be right. Run as a program::

    PYTHONPATH=benchmarks python tests/storage/storage_fuzz.py --trials 10000 --seed 0
"""

import argparse
import collections
import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import torch
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    DatasetError,
    Writer,
    appending,
    concatenate,
    copy,
)
from marl_collect.storage.index import JOURNAL

IMAGE = ("hunter", "image")
NOISE = ("prey", "noise")
SHAPE = (40, 36, 3)


def with_images(batch: TensorDict, seed: int = 0) -> TensorDict:
    """Return a batch ``[B, T]`` with images that compress, and noise that does not."""
    batch = batch.clone()
    draw = torch.Generator().manual_seed(seed)
    size, length = batch.shape
    done = batch["next", "done"][..., 0]
    for (group, name), blocks in ((IMAGE, 9), (NOISE, 1)):
        n = batch[group].shape[-1]
        shape = (size, length + 1, n, SHAPE[0], SHAPE[1] // blocks, SHAPE[2])
        pixels = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
        pixels = pixels.repeat_interleave(blocks, -2)
        following = pixels[:, 1:].clone()
        following[done] = 255 - following[done]  # Not the root of the next episode.
        batch[group, name] = pixels[:, :-1].clone()
        batch["next", group, name] = following
    return batch


def batches(count: int, seed: int = 0) -> tuple[DatasetDescription, list[TensorDict]]:
    """Collect batches ``[2, 10]`` with images."""
    collector = Collector(
        [CountingEnv] * 2, frames_per_batch=20, total_frames=20 * count, seed=seed
    )
    description = DatasetDescription("c", collector.description)
    return description, [with_images(b, i) for i, b in enumerate(collector)]


def write(
    path: Path, compression: Any = "lz4", seeds: tuple[int, ...] = (0, 1)
) -> None:
    """Write a run per seed, whose episodes cross batches."""
    for seed in seeds:
        description, data = batches(2, seed)
        with Writer(path, description, compression=compression) as writer:
            for batch in data:
                writer.add(batch)


def read_all(dataset: Dataset) -> list[Any]:
    """Read a dataset in every possible way."""
    contents = dataset.contents
    return [
        dataset[:],
        dataset.transitions[:],
        list(dataset.episodes()),
        list(dataset.trajectories),
        dataset.trajectories.seeds,
        [contents.keys, contents.runs, contents.totals, contents.description.task],
        contents.description.to_json(),
        [e for batch in range(len(dataset)) for e in dataset.episodes(batch)],
    ]


def same(actual: Any, expected: Any) -> bool:
    """Whether two readings are equal in keys, shapes, dtypes and values."""
    if isinstance(actual, list):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if hasattr(actual, "batch_size"):
        keys = set(actual.keys(True, True))
        if (
            keys != set(expected.keys(True, True))
            or actual.batch_size != expected.batch_size
        ):
            return False
        return all(
            actual[k].dtype == expected[k].dtype and torch.equal(actual[k], expected[k])
            for k in keys
        )
    return bool(actual == expected)


def write_one(folder: Path, compression: Any) -> None:
    """Write a dataset."""
    write(folder, compression)


def write_two(folder: Path, compression: Any) -> None:
    """Write two datasets into a folder."""
    write(folder / "a", compression)
    write(folder / "b", compression, (2,))


def write_segments(folder: Path, compression: Any) -> None:
    """Write a dataset of small batches in several data files."""
    description, data = batches(4, 1)
    before, appending.SEGMENT = appending.SEGMENT, 1  # type: ignore[misc]
    try:
        with Writer(folder, description, compression=compression) as writer:
            for batch in data:
                for piece in batch.split(5, 1):
                    writer.add(piece)
    finally:
        appending.SEGMENT = before  # type: ignore[misc]


def read_folder(folder: Path) -> list[Any]:
    """Read a dataset from its folder."""
    return read_all(open_dataset(folder))


def read_concatenated(folder: Path) -> list[Any]:
    """Read two datasets as one."""
    return read_all(concatenate([folder / "a", folder / "b"]))


def read_copied(folder: Path) -> list[Any]:
    """Copy a dataset, and read the copy."""
    with tempfile.TemporaryDirectory() as name:
        copy(folder, Path(name) / "d")
        return read_all(open_dataset(Path(name) / "d"))


def read_remote(folder: Path) -> list[Any]:
    """Read a dataset from a memory file system, which gets the files as they are."""
    root = str(folder).lstrip("/")
    store = fsspec.filesystem("memory")
    if store.exists(root):
        store.rm(root, recursive=True)
    for path in folder.rglob("*"):
        if not path.is_dir():
            store.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return read_all(open_dataset(f"memory://{root}"))


Reader = Callable[[Path], list[Any]]
FORMS: dict[str, tuple[Callable[[Path, Any], None], Reader]] = {
    "folder": (write_one, read_folder),
    "open": (write_one, read_folder),
    "open, many batches": (write_segments, read_folder),
    "concatenated": (write_two, read_concatenated),
    "damaged, then copied": (write_one, read_copied),
    "remote": (write_one, read_remote),
}
"""How datasets are written and read, by name; a third is open when it is damaged."""


@dataclass
class Outcome:
    """Counts of trials.

    Attributes:
        errors: trials that raised an error which names the dataset.
        right: trials whose data were right.
        wrong: descriptions of the other ones.
        kinds: how often each kind of damage was done.
    """

    errors: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)


def fuzz(
    folder: Path,
    trials: int,
    seed: int,
    read: Reader = read_folder,
    *,
    opened: bool = False,
) -> Outcome:
    """Damage the files in ``folder`` in each trial, and repair them afterwards.

    Args:
        folder: with one or several datasets.
        trials: how often.
        seed: of the damages.
        read: reads what is in ``folder``.
        opened: open the dataset and read it before it is damaged.
    """
    contents = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    complete = _lines(contents)
    expected = {complete: read(folder)}
    draw = random.Random(seed)
    outcome = Outcome()
    for trial in range(trials):
        reading = functools.partial(read, folder)
        if opened:
            dataset = open_dataset(folder)
            if draw.random() < 0.9:
                read_all(dataset)
            reading = functools.partial(read_all, dataset)
        changes = []
        for path in draw.sample(list(contents), draw.choice([1, 1, 1, 2])):
            kind = draw.choice(["flip", "flip", "flips", "cut", "extend", "gone"])
            kind = draw.choice([kind, kind, kind, "link", "zeros", "in place"])
            damage(path, kind, draw)
            changes.append(f"{kind} {path.relative_to(folder)}")
            outcome.kinds[kind] += 1
        # An open dataset does not read its journal again.
        lines = complete if opened else _lines(contents)
        actual = _attempt(reading, folder)
        _restore(contents)
        if isinstance(actual, DatasetError | FileNotFoundError):
            outcome.errors += 1
            continue
        if lines not in expected:
            _restore(contents, lines)
            expected[lines] = read(folder)
            _restore(contents)
        if isinstance(actual, str):
            outcome.wrong.append(f"trial {trial}: {changes}: {actual}")
        elif same(actual, expected[lines]):
            outcome.right += 1
        else:
            outcome.wrong.append(f"trial {trial}: {changes}: wrong data")
    return outcome


def _attempt(
    read: Callable[[], list[Any]], folder: Path
) -> list[Any] | str | Exception:
    """Return what is read, the error, or a text about an error that may not be."""
    try:
        return read()
    except (DatasetError, FileNotFoundError) as error:
        if str(folder).lstrip("/") in str(error):  # A URL has no first slash.
            return error
        return f"no path: {error}"
    except Exception as error:  # noqa: BLE001 - any other error is a finding
        return repr(error)


def _lines(contents: Mapping[Path, bytes]) -> tuple[bytes, ...]:
    """The complete lines of all journals that are there now."""
    return tuple(
        path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""
        for path in contents
        if path.name == JOURNAL
    )


def _restore(contents: Mapping[Path, bytes], lines: tuple[bytes, ...] = ()) -> None:
    """Repair all files, with these lines in the journals."""
    journals = [path for path in contents if path.name == JOURNAL]
    shorter = dict(zip(journals, lines, strict=False))
    for path, content in contents.items():
        path.unlink(missing_ok=True)  # It may be a link.
        path.write_bytes(shorter[path] + b"\n" if path in shorter else content)


def damage(path: Path, kind: str, draw: random.Random) -> None:
    """Damage one file."""
    content = bytearray(path.read_bytes())
    if kind == "gone" or not content:
        path.unlink()
    elif kind == "link":
        path.unlink()
        path.symlink_to(os.devnull)
    elif kind == "cut":
        os.truncate(path, draw.randrange(len(content)))
    elif kind == "extend":
        path.write_bytes(content + draw.randbytes(draw.randint(1, 20)))
    elif kind == "in place":
        begin = draw.randrange(len(content))
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(bytes(byte ^ 0xFF for byte in content[begin : begin + 8]))
    elif kind == "zeros":
        begin = draw.randrange(len(content))
        end = min(len(content), begin + draw.choice([1, 8, 512]))
        content[begin:end] = bytes(end - begin)
        path.write_bytes(content)
    else:
        for _ in range(1 if kind == "flip" else draw.randint(2, 20)):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)


def main() -> int:
    """Print the counts, and the trials with wrong data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # Small tensors; faster where other programs run too.
    print("trials    errors    right     wrong   compression and form")
    totals = [0, 0, 0, 0]
    cells = list(product(("lz4", "zstd", "none"), FORMS))
    for compression, form in cells:
        prepare, read = FORMS[form]
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder) / "d", compression)
            count = options.trials // len(cells) + 1
            opened = form.startswith("open")
            outcome = fuzz(Path(folder) / "d", count, options.seed, read, opened=opened)
        counts = [count, outcome.errors, outcome.right, len(outcome.wrong)]
        totals = [old + new for old, new in zip(totals, counts, strict=True)]
        print(_row(counts), f"{compression}, {form}", flush=True)
        for line in outcome.wrong[:20]:
            print(line)
    print(_row(totals), "all")
    return int(totals[-1] > 0)


def _row(counts: list[int]) -> str:
    return "".join(f"{count:<10,}" for count in counts)


if __name__ == "__main__":
    sys.exit(main())
