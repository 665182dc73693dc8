"""Sizes and rates of datasets of images: forms, collecting, sampling, offline training.

The table in docs/storage.md comes from the first of these, and the second one prints
everything::

    python benchmarks/dataset_rates.py coins --forms
    python benchmarks/dataset_rates.py coins

The first table compares forms of the same complete episodes. Writing ends when the
files are on the disk. HDF5 and Minari are exports of the raw dataset, so reading it is
included. A transition is a frame and the following observation, with all keys. Rates
are in bytes of tensors in memory, which have every observation twice. The HDF5 file is
read with h5py, and Minari with its own reader, which reads whole episodes. Forms whose
packages are missing are omitted.

The dataset of 100,000 frames consists of the same 2000 frames, written 50 times. It is
in the page cache while it is read, if the machine has the memory.
"""

import argparse
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from marl_collect import MultiSyncCollector, record
from marl_collect.cli.tasks import find_factory
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import (
    BackgroundWriter,
    Dataset,
    DatasetDescription,
    Writer,
    export_dataset,
    open_dataset,
)
from marl_collect.storage.files import size_of, sync_tree

FRAMES = 2000
COMPRESSIONS: tuple[Any, ...] = ("none", "lz4", "zstd")
RAW = "dataset, none"
"""Form that is exported."""
MINARI_ID = "forms-v0"
Read = Callable[[np.ndarray], Any]
"""Reads the frames with these ascending numbers."""


def read_dataset(path: Path) -> Read:
    """Read with a dataset's transitions."""
    transitions = open_dataset(path).transitions
    return lambda numbers: transitions[numbers]


def read_memmap(path: Path) -> Read:
    """Read with tensordict."""
    frames = TensorDict.load_memmap(path)
    return lambda numbers: frames[torch.from_numpy(numbers)]


def read_hdf5(path: Path) -> Read:
    """Read arrays with h5py; most next values are those of the following frame."""
    import h5py

    file = h5py.File(path)
    count = int(file["episodes/length"][:].sum())
    arrays: dict[str, Any] = {}
    file["frames"].visititems(
        lambda name, item: arrays.update({name: item} if hasattr(item, "dtype") else {})
    )

    def read(numbers: np.ndarray) -> None:
        both = np.unique(np.concatenate([numbers, numbers + 1]))
        for name, array in arrays.items():
            rows = both if f"next/{name}" in arrays else numbers
            if len(array) < count:
                continue
            if rows[-1] - rows[0] + 1 == len(rows):
                array[rows[0] : rows[-1] + 1]
            else:  # h5py is slower with a list.
                np.stack([array[row] for row in rows])

    return read


def read_minari(_path: Path) -> Read:
    """Read the episodes of the frames with Minari."""
    import minari

    data = minari.load_dataset(MINARI_ID)
    about = data.storage.get_episode_metadata(range(data.total_episodes))
    ends = np.cumsum([each["total_steps"] for each in about])

    def read(numbers: np.ndarray) -> None:
        episodes = np.unique(np.searchsorted(ends, numbers, side="right"))
        for _ in data.iterate_episodes(episodes.tolist()):
            pass

    return read


def compare_forms(task: str, folder: Path, episodes: int) -> None:
    """Print sizes and rates of the same episodes in several forms."""
    recorded = record(
        folder / "recorded",
        find_factory(task, {}),
        policy=None,
        episodes=episodes,
        num_workers=2,
        seed=0,
    )
    found = recorded.trajectories.transitions[:]
    frames = TensorDict(found.to_dict(), found.batch_size)
    about = recorded.contents.description
    count, nbytes = len(frames), sum(t.nbytes for t in flatten(frames).values())

    def write(compression: Any, path: Path) -> Path:
        with Writer(path, about, compression=compression) as writer:
            writer.add(frames.unsqueeze(0))
        return path

    def write_memmap(path: Path) -> Path:
        frames.memmap(path)
        sync_tree(path)
        return path

    def export(name: str, path: Path) -> Path:
        target = MINARI_ID if name == "minari" else str(path)
        return export_dataset(open_dataset(folder / RAW), target, name)

    forms: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Read]]] = {
        f"dataset, {name}": (partial(write, name), read_dataset)
        for name in COMPRESSIONS
    }
    forms["TensorDict memmap"] = write_memmap, read_memmap
    if importlib.util.find_spec("h5py"):
        forms["HDF5, gzip"] = partial(export, "hdf5"), read_hdf5
    if importlib.util.find_spec("minari"):
        forms["Minari, gzip"] = partial(export, "minari"), read_minari
    print(f"{episodes} episodes of {task}, {count:,} frames, {nbytes / 1e6:,.0f} MB\n")
    print("| form | MB | write, MB/s | 256 transitions, ms | sequences of 50, MB/s |")
    print("|---|---|---|---|---|", flush=True)
    rng = np.random.default_rng(0)
    for name, (write_form, open_form) in forms.items():
        begin = time.perf_counter()
        path = write_form(folder / name)
        taken = time.perf_counter() - begin
        size = size_of(path) if path.is_dir() else path.stat().st_size
        read = open_form(path)

        def sample(read: Read = read) -> None:
            read(np.sort(rng.choice(count - 1, 256, replace=False)))

        def sequence(read: Read = read) -> None:
            read(rng.integers(count - 50) + np.arange(50))

        rate = nbytes / count * 50 / median(sequence, 50, 5)
        print(
            f"| {name} | {size / 1e6:,.1f} | {nbytes / taken / 1e6:,.0f} "
            f"| {median(sample, 50, 5) * 1e3:,.1f} | {rate / 1e6:,.0f} |",
            flush=True,
        )


def collect(task: str, path: Path, compression: Any, frames: int) -> float:
    """Collect as the command line does; return frames per second after the start."""
    with MultiSyncCollector(
        find_factory(task, {}),
        frames_per_batch=FRAMES,
        total_frames=frames + FRAMES,
        num_workers=2,
        seed=0,
    ) as collector:
        about = DatasetDescription(task, collector.description)
        writer = BackgroundWriter(Writer(path, about, compression=compression))
        with writer:
            writer.add(collector.next())  # The start is not measured.
            begin = time.perf_counter()
            while (batch := collector.next()) is not None:
                writer.add(batch)
        return frames / (time.perf_counter() - begin)


def repeated(source: Dataset, path: Path, compression: Any, times: int) -> Dataset:
    """Write the first batch of a dataset several times."""
    batch = source[0].clone()
    for _ in range(times):  # One run each, because trajectories would repeat.
        with Writer(
            path, source.contents.description, compression=compression
        ) as writer:
            writer.add(batch)
    return open_dataset(path)


def median(
    call: Callable[[], Any], times: int = 15, seconds: float = math.inf
) -> float:
    """Return the median seconds of a call, after one that is not counted.

    It is called ``times`` times, or fewer after ``seconds``, at least once.
    """
    call()
    taken: list[float] = []
    while not taken or (len(taken) < times and sum(taken) < seconds):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def clone_behaviour(dataset: Dataset, batches: int) -> tuple[float, float]:
    """Train a small network to repeat the actions; return the seconds of reading, all.

    The dataset's largest key is the input.
    """
    fields = [f for f in dataset.contents.keys if f.key[0] != "next"]
    image = max(fields, key=lambda f: f.nbytes).key
    group = dataset.contents.description.environment.groups[image[0]]
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 8, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 4, 2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, int(getattr(group.action, "n"))),  # noqa: B009 - a Discrete
    )
    optimiser: Any = None
    frames = dataset.transitions.select(image, (image[0], "action"))
    reading = 0.0
    begin = before = time.perf_counter()
    for _ in range(batches):
        batch: TensorDict = frames.sample(256)
        reading += time.perf_counter() - before
        pixels = batch[image].flatten(0, 1).permute(0, 3, 1, 2).float() / 255
        actions = batch[image[0], "action"].flatten()
        loss = torch.nn.functional.cross_entropy(network(pixels), actions)
        if optimiser is None:
            optimiser = torch.optim.Adam(network.parameters())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        before = time.perf_counter()
    return reading, time.perf_counter() - begin


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default="coins")
    parser.add_argument("--frames", type=int, default=20_000, help="to collect")
    parser.add_argument("--repeats", type=int, default=50, help="of 2000 frames")
    parser.add_argument("--batches", type=int, default=30, help="to train on")
    parser.add_argument("--episodes", type=int, default=4, help="in each form")
    parser.add_argument("--forms", action="store_true", help="print that table only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MINARI_DATASETS_PATH"] = str(folder / "store")
        compare_forms(options.task, folder / "forms", options.episodes)
        if options.forms:
            return
        print("\n| compression | frames/s | MB per 2000 frames |\n|---|---|---|")
        for compression in COMPRESSIONS:
            path = folder / compression
            rate = collect(options.task, path, compression, options.frames)
            megabytes = size_of(path) / 1e6 / len(open_dataset(path))
            print(f"| {compression} | {rate:,.0f} | {megabytes:,.1f} |", flush=True)
        source = open_dataset(folder / "lz4")
        print(f"\n{options.repeats * FRAMES:,} frames:")
        print("| compression | 256 transitions, ms | sequences of 50, MB/s |")
        print("|---|---|---|")
        for compression in COMPRESSIONS[1:]:
            path = folder / f"{compression}-large"
            large = repeated(source, path, compression, options.repeats)
            sample = median(partial(large.transitions.sample, 256))
            begin = [0]

            def sequence(dataset: Dataset = large, at: list[int] = begin) -> Any:
                at[0] = (at[0] + 7919) % (len(dataset.transitions) - 50)
                return dataset.transitions[at[0] : at[0] + 50]

            nbytes = sum(t.nbytes for t in flatten(sequence()).values())
            rate = nbytes / median(sequence)
            print(f"| {compression} | {sample * 1e3:,.1f} | {rate / 1e6:,.0f} |")
        reading, total = clone_behaviour(large, options.batches)
        print(
            f"\nBehaviour cloning: {options.batches * 256 / total:,.0f} frames/s, "
            f"{reading / total:.1%} of the time reading ({compression})"
        )


if __name__ == "__main__":
    main()
