"""Sizes and rates of datasets of images: collecting, sampling, offline training.

python benchmarks/dataset_rates.py coins

The dataset of 100,000 frames consists of the same 2000 frames, written 50 times. It is
in the page cache while it is read, if the machine has the memory.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from marl_collect import MultiSyncCollector
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
from marl_collect.storage.files import size_of

FRAMES = 2000
COMPRESSIONS: tuple[Any, ...] = ("none", "lz4", "zstd")


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


def median(call: Callable[[], Any], times: int = 15) -> float:
    """Return the median seconds of a call, after one that is not counted."""
    call()
    taken = []
    for _ in range(times):
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("| compression | frames/s | MB per 2000 frames |\n|---|---|---|")
        for compression in COMPRESSIONS:
            path = folder / compression
            rate = collect(options.task, path, compression, options.frames)
            megabytes = size_of(path) / 1e6 / len(open_dataset(path))
            print(f"| {compression} | {rate:,.0f} | {megabytes:,.1f} |", flush=True)
        source = open_dataset(folder / "lz4")
        if len(source.trajectories):
            frames = int(source.trajectories.lengths.sum())
            file = export_dataset(source, folder / "out.hdf5")
            megabytes = file.stat().st_size / 1e6 * FRAMES / frames
            print(f"| export to HDF5, gzip | - | {megabytes:,.1f} |", flush=True)
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
