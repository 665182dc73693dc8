"""Damages a dataset at random; every read must raise an error or give the right data.

A trial flips bits, cuts, extends or removes files, or puts links in their place, in a
dataset with raw and packed files of two runs. Run as a program::

    python tests/storage/storage_fuzz.py --trials 10000 --seed 0
"""

import argparse
import collections
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from marl_collect import Collector, open_dataset
from marl_collect.storage import Dataset, DatasetDescription, DatasetError, Writer
from marl_collect.testing.counting import CountingEnv

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


def write(path: Path, compression: Any = "lz4") -> None:
    """Write two runs, whose episodes cross batches."""
    for seed in (0, 1):
        description, data = batches(2, seed)
        with Writer(path, description, compression=compression) as writer:
            for batch in data:
                writer.add(batch)


def read_all(dataset: Dataset) -> list[Any]:
    """Read a dataset in every possible way."""
    contents = dataset.contents
    return [
        [batch.clone() for batch in dataset],
        dataset.transitions[:],
        list(dataset.episodes()),
        list(dataset.trajectories),
        dataset.trajectories.seeds,
        [contents.keys, contents.runs, contents.totals, contents.description.task],
        contents.description.to_json(),
    ]


def same(a: Any, b: Any) -> bool:
    """Whether two readings are equal in keys, shapes, dtypes and values."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "batch_size"):
        keys = set(a.keys(True, True))
        if keys != set(b.keys(True, True)) or a.batch_size != b.batch_size:
            return False
        return all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in keys)
    return bool(a == b)


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


def fuzz(folder: Path, trials: int, seed: int) -> Outcome:
    """Damage the dataset in ``folder`` in each trial, and repair it afterwards."""
    expected = read_all(open_dataset(folder))
    contents = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    draw = random.Random(seed)
    outcome = Outcome()
    for trial in range(trials):
        done = []
        for path in draw.sample(list(contents), draw.choice([1, 1, 1, 3])):
            kind = draw.choice(["flip", "flip", "flips", "cut", "extend", "gone"])
            kind = draw.choice([kind, kind, kind, "link", "zeros"])
            damage(path, kind, draw)
            done.append(f"{kind} {path.relative_to(folder)}")
            outcome.kinds[kind] += 1
        try:
            found = read_all(open_dataset(folder))
        except (DatasetError, FileNotFoundError) as error:
            if str(folder) in str(error):
                outcome.errors += 1
            else:
                outcome.wrong.append(f"trial {trial}: {done}: no path: {error}")
        except Exception as error:  # noqa: BLE001 - any other error is a finding
            outcome.wrong.append(f"trial {trial}: {done}: {error!r}")
        else:
            if same(found, expected):
                outcome.right += 1
            else:
                outcome.wrong.append(f"trial {trial}: {done}: wrong data")
        for name in done:
            path = folder / name.partition(" ")[2]
            path.unlink(missing_ok=True)  # It may be a link.
            path.write_bytes(contents[path])
    return outcome


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
    print("trials    errors    right     wrong   compression")
    failed = False
    for compression in ("lz4", "zstd", "none"):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "d", compression)
            count = options.trials // 3 + 1
            outcome = fuzz(Path(folder) / "d", count, options.seed)
        print(
            f"{count:<10,}{outcome.errors:<10,}{outcome.right:<10,}"
            f"{len(outcome.wrong):<8,}{compression}   {dict(outcome.kinds)}"
        )
        for line in outcome.wrong[:20]:
            print(line)
        failed = failed or bool(outcome.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
