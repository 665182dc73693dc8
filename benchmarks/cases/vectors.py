"""Datasets of vectors: random frames, sequences, writing, copying, and sizes.

The frames are of simple_spread, written in batches of 2,000; the numbers of
trajectories go on, as in one long run. "memory" is the same read from a TensorDict in
memory, which no dataset can be much faster than. Everything that is read is in the page
cache. Sizes are of 20,000 frames of random actions.
"""

import functools
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.turns import Alternative
from tensordict import TensorDict

from cases.case import Case
from cases.datasets import SAMPLE, cloning, folder, remove, size
from marl_collect import Collector
from marl_collect.cli.tasks import find_factory
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    Writer,
    copy,
    open_dataset,
)
from marl_collect.storage.files import sync_tree

TASK = "simple_spread_v3"
BATCH = 2000
COUNTS = (10_000, 100_000, 1_000_000)
COPIED = 100_000
"""Frames of each of two datasets that are copied."""
EPISODES = 100_000
"""Episodes of one frame, for the export."""
SEQUENCE, SEQUENCES = 50, 32
SELECTED = (("agent", "observation"), ("agent", "action"), ("next", "agent", "reward"))
SIZES = (TASK, "connect_four_v3", "knights_archers_zombies_v11")


@functools.cache
def collected(task: str = TASK) -> tuple[Any, list[TensorDict]]:
    """Return the description of a task, and ten batches of random actions."""
    collector = Collector(
        find_factory(task, {}), frames_per_batch=BATCH, total_frames=10 * BATCH, seed=0
    )
    about = DatasetDescription(task, collector.description)
    return about, [batch.clone() for batch in collector]


def batch(number: int) -> TensorDict:
    """Return a batch of a long run: after ten, they repeat with other trajectories."""
    renumbered: TensorDict = collected()[1][number % 10].clone()
    renumbered["collector", "traj_ids"] += number // 10 * 10_000
    return renumbered


@functools.cache
def dataset(frames: int, name: str = "vectors") -> Dataset:
    """Return a dataset, written once."""
    path = folder() / f"{name}, {frames}"
    with Writer(path, collected()[0]) as writer:
        for number in range(frames // BATCH):
            writer.add(batch(number))
    return open_dataset(path)


@functools.cache
def memory(frames: int) -> TensorDict:
    """Return the same frames in memory."""
    batches = [batch(number) for number in range(frames // BATCH)]
    transitions: TensorDict = torch.cat(batches, 1)[0]
    return transitions


def sampling(_: ExitStack, frames: int, keys: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the reading of random transitions."""
    transitions, in_memory = dataset(frames).transitions, memory(frames)
    if keys:
        transitions, in_memory = transitions.select(*keys), in_memory.select(*keys)
    transitions[:: BATCH // 2]  # Reads and checks all batches.
    return {
        "memory": Alternative.once(lambda: in_memory[torch.randint(frames, (SAMPLE,))]),
        "dataset": Alternative.once(lambda: transitions.sample(SAMPLE)),
    }


def sequences(_: ExitStack, frames: int) -> dict[str, Alternative]:
    """Return the reading of sequences from complete episodes."""
    in_memory = memory(frames)
    trajectories = dataset(frames).trajectories.transitions
    columns = torch.arange(SEQUENCE)

    def rows() -> torch.Tensor:
        return (torch.randint(frames - SEQUENCE, (SEQUENCES, 1)) + columns).flatten()

    last = len(trajectories) - SEQUENCE

    def read() -> object:
        begin = torch.randint(last, (SEQUENCES, 1))
        return trajectories[(begin + columns).flatten()]

    return {
        "memory": Alternative.once(lambda: in_memory[rows()]),
        "dataset": Alternative.once(read),
    }


def adding(stack: ExitStack) -> dict[str, Alternative]:
    """Return the writing of a batch of 1 MB; both wait for the disk."""
    about, _ = collected()
    writer = stack.enter_context(Writer(folder() / "adding", about))
    file = folder() / "saved.pt"
    first_batch = batch(0)

    def save_synced() -> None:
        torch.save(first_batch.to_dict(), file)
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())

    return {
        "torch.save and fsync": Alternative.once(save_synced),
        "dataset": Alternative.once(partial(add_again, writer, first_batch)),
    }


def add_again(writer: Writer, first_batch: TensorDict) -> None:
    """Add a batch with other trajectories than before."""
    first_batch["collector", "traj_ids"] += 10_000
    writer.add(first_batch)


def copying(_: ExitStack) -> dict[str, Alternative]:
    """Return copies of two datasets; all wait for the disk."""
    sources = [dataset(COPIED, name).path for name in ("first", "second")]
    target = folder() / "copied"

    def plain() -> None:
        target.mkdir()
        for source in sources:
            subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        sync_tree(target)

    def copy_both() -> None:
        for source in sources:
            copy(source, target / source.name)

    def call(function: Any) -> Alternative:
        return Alternative(lambda: (function(), 1.0)[1], partial(remove, target))

    return {
        "cp -r and sync": call(plain),
        "copy": call(copy_both),
    }


def opening(_: ExitStack, frames: int) -> dict[str, Alternative]:
    """Return the opening of a dataset, and the positions of its episodes."""
    path = dataset(frames).path
    return {
        "open": Alternative.once(lambda: open_dataset(path)),
        "episodes": Alternative.once(lambda: open_dataset(path).trajectories),
    }


@functools.cache
def short_episodes() -> Dataset:
    """Return a dataset of many episodes of one frame."""
    path = folder() / "short episodes"
    frames: TensorDict = torch.cat([collected()[1][0][0]] * 10)
    for key in ("done", "terminated"):
        frames["next", key] = torch.ones_like(frames["next", key])
    with Writer(path, collected()[0]) as writer:
        for number in range(EPISODES // len(frames)):
            ids = torch.arange(len(frames)) + number * len(frames)
            frames["collector", "traj_ids"] = ids
            writer.add(frames.unsqueeze(0))
    return open_dataset(path)


def exporting(_: ExitStack) -> dict[str, Alternative]:
    """Return the writing of all short episodes to another dataset."""
    episodes_dataset, target = short_episodes(), folder() / "short, saved"
    return {
        "save": Alternative(
            Alternative.once(partial(episodes_dataset.trajectories.save, target)).call,
            partial(remove, target),
        )
    }


def sizes(_: ExitStack) -> dict[str, Alternative]:
    """Return the writing of the frames of several tasks, and their sizes."""
    alternatives = {}
    for task in SIZES:
        about, batches = collected(task)
        path = folder() / f"size of {task}"

        def write(about: Any = about, batches: Any = batches, path: Path = path) -> Any:
            with Writer(path, about) as writer:
                for collected_batch in batches:
                    writer.add(collected_batch)
            return 10.0 * BATCH

        alternatives[task] = Alternative(
            write, partial(remove, path), partial(size, path)
        )
    return alternatives


def collecting(_: ExitStack) -> dict[str, Alternative]:
    """Return collection without and with writing."""
    path = folder() / "collecting"

    def collect(*, write: bool) -> float:
        shutil.rmtree(path, ignore_errors=True)
        collector = Collector(
            find_factory(TASK, {}), frames_per_batch=BATCH, total_frames=2 * BATCH
        )
        about = DatasetDescription(TASK, collector.description)
        with Writer(path, about) as writer:
            for collected_batch in collector:
                if write:
                    writer.add(collected_batch)
        return 2.0 * BATCH

    return {
        "without writing": Alternative(partial(collect, write=False)),
        "with writing": Alternative(partial(collect, write=True)),
    }


def behaviour_cloning(_: ExitStack) -> dict[str, Alternative]:
    """Return learning from a batch, and reading it, at the largest dataset."""
    transitions = dataset(COUNTS[-1]).transitions.select(*SELECTED[:2])
    sample = transitions.sample(SAMPLE)
    observations = sample["agent", "observation"]
    network = torch.nn.Sequential(
        torch.nn.Linear(observations.shape[-1], 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 5),
    )
    return cloning(network, observations, sample["agent", "action"], transitions)


def cases() -> list[Case]:
    """Return the rows."""
    rows = []
    for frames in COUNTS:
        name = f"{frames:,} frames"
        rows.append(Case(f"256 of {name}", partial(sampling, frames=frames)))
        selected = partial(sampling, frames=frames, keys=SELECTED)
        rows.append(Case(f"256 of {name}, three keys", selected))
        rows.append(Case(f"32 sequences of {name}", partial(sequences, frames=frames)))
    largest = COUNTS[-1]
    return [
        *rows,
        Case("behaviour cloning", behaviour_cloning, "batch"),
        Case(f"open {largest:,} frames", partial(opening, frames=largest), per="ms"),
        Case("add 1 MB", adding, per="ms", clock=time.perf_counter),
        Case("copy two datasets", copying, per="ms", clock=time.perf_counter),
        Case("100,000 short episodes", exporting, per="s", clock=time.perf_counter),
        Case("sizes of 20,000 frames", sizes, "frame", clock=time.perf_counter),
        Case("collect", collecting, "frame", clock=time.perf_counter),
    ]
