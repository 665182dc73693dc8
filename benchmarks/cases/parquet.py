"""The format that datasets get, beside the one that they have and an index of memory.

"memory" is the same frames in one TensorDict. A row's frames are 20,000 collected ones,
written as often as needed, each time as a run. Both formats are in the page cache. MB
of a "write" row is the size on disk. Rows with 1,000,000 frames need minutes to begin.
"""

import atexit
import functools
import itertools
import shutil
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.turns import Alternative
from tensordict import TensorDict

from cases.case import Case
from marl_collect import Collector, describe
from marl_collect.cli.tasks import find_factory
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.description import DatasetDescription
from marl_collect.storage.files import size_of
from marl_collect.storage.parquet.dataset import open_dataset as open_parquet
from marl_collect.storage.parquet.writer import Writer as ParquetWriter
from marl_collect.storage.writer import Writer as OldWriter

TASKS = {
    "simple_spread_v3": (10_000, 100_000, 1_000_000),
    "connect_four_v3": (10_000,),
    "knights_archers_zombies_v11": (10_000,),
    "coins": (2_000,),
}
"""Tasks with the numbers of frames of their rows."""
COLLECTED, BATCH = 20_000, 2_000
SAMPLE, SEQUENCES, LENGTH = 256, 32, 50
WRITERS: dict[str, Any] = {"format 3": OldWriter, "Parquet": ParquetWriter}
OPENERS: dict[str, Any] = {"format 3": open_dataset, "Parquet": open_parquet}


@functools.cache
def folder() -> Path:
    """Return the folder of this process for all files."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def batches(task: str) -> tuple[DatasetDescription, list[TensorDict]]:
    """Return collected batches, and their description."""
    factory = find_factory(task, {})
    count = min(COLLECTED, max(TASKS[task]))
    with Collector(
        [factory] * 4, seed=0, frames_per_batch=min(BATCH, count), total_frames=count
    ) as collector:
        data = [batch.clone() for batch in collector]
    return DatasetDescription(task, describe(factory)), data


def write(name: str, task: str, frames: int, path: Path) -> None:
    """Write a number of frames."""
    about, data = batches(task)
    parts = itertools.cycle(data)
    left = frames
    while left > 0:
        with WRITERS[name](path, about) as writer:
            for batch in itertools.islice(parts, len(data)):
                if left > 0:
                    writer.add(batch)
                    left -= batch.numel()


@functools.cache
def written(name: str, task: str, frames: int) -> Any:
    """Return a dataset, written and opened once."""
    path = folder() / f"{name} {task} {frames}"
    write(name, task, frames, path)
    return OPENERS[name](path)


def writing(_: ExitStack, task: str) -> dict[str, Alternative]:
    """Return the writing of a batch by a writer that stays open."""
    frames = min(COLLECTED, max(TASKS[task]))
    about, data = batches(task)
    alternatives = {}
    for name, writer_class in WRITERS.items():
        path = written(name, task, frames).path
        paths = [p for p in path.iterdir() if not p.name.startswith(".")]
        size = float(sum(size_of(p) if p.is_dir() else p.stat().st_size for p in paths))

        def call(writer_class: Any = writer_class) -> float:
            target = folder() / "again"
            with writer_class(target, about) as writer:
                for batch in data:
                    writer.add(batch)
            shutil.rmtree(target)
            return float(frames)

        alternatives[name] = Alternative(call, nbytes=partial(float, size))
    return alternatives


def in_memory(task: str, frames: int) -> TensorDict:
    """Return all frames in one TensorDict."""
    read: Any = written("Parquet", task, frames).transitions[:]
    return TensorDict(read.to_dict(), read.batch_size)


def three_keys(task: str) -> list[Any]:
    """Return an observation, an action and a reward."""
    _, data = batches(task)
    group = next(iter(batches(task)[0].environment.groups))
    keys = [(group, "observation"), (group, "action"), ("next", group, "reward")]
    return [key for key in keys if key in data[0].keys(include_nested=True)]


def sampling(
    _: ExitStack, task: str, frames: int, *, few: bool
) -> dict[str, Alternative]:
    """Return the reading of random frames."""
    memory = in_memory(task, frames)
    keys = three_keys(task)
    if few:
        memory = memory.select(*keys)
    alternatives = {
        "memory": Alternative.once(
            lambda: memory[torch.randint(len(memory), (SAMPLE,))]
        )
    }
    for name in WRITERS:
        transitions = written(name, task, frames).transitions
        transitions = transitions.select(*keys) if few else transitions
        alternatives[name] = Alternative.once(partial(transitions.sample, SAMPLE))
    return alternatives


def sequences(_: ExitStack, task: str, frames: int) -> dict[str, Alternative]:
    """Return the reading of random sequences."""
    memory = in_memory(task, frames)
    steps = torch.arange(LENGTH)
    alternatives = {
        "memory": Alternative.once(
            lambda: memory[
                torch.randint(len(memory) - LENGTH, (SEQUENCES, 1)).add(steps)
            ]
        )
    }
    rng = np.random.default_rng(0)
    for name in WRITERS:
        frame_list: Any = written(name, task, frames).transitions

        def call(frame_list: Any = frame_list) -> None:
            first = rng.integers(len(frame_list) - LENGTH, size=(SEQUENCES, 1))
            frame_list[(first + np.arange(LENGTH)).reshape(-1)]

        alternatives[name] = Alternative.once(call)
    return alternatives


def opening(_: ExitStack, task: str, frames: int) -> dict[str, Alternative]:
    """Return the opening of a dataset whose cache is complete, and of a new one."""
    path = written("Parquet", task, frames).path

    def anew() -> None:
        shutil.rmtree(path / ".cache")
        open_parquet(path)

    old = written("format 3", task, frames).path
    return {
        "format 3": Alternative.once(lambda: open_dataset(old).trajectories),
        "Parquet": Alternative.once(lambda: open_parquet(path).trajectories),
        "Parquet, first": Alternative.once(anew),
    }


def cases() -> list[Case]:
    """Return the rows of every task."""
    rows = []
    for task, sizes in TASKS.items():
        rows.append(Case(f"{task}, write", partial(writing, task=task), "frame"))
        for frames in sizes:
            title = f"{task}, {frames:,} frames"
            of: dict[str, Any] = {"task": task, "frames": frames}
            rows += [
                Case(
                    f"{title}, {SAMPLE} random",
                    partial(sampling, few=False, **of),
                    "sample",
                ),
                Case(
                    f"{title}, {SAMPLE} random of three keys",
                    partial(sampling, few=True, **of),
                    "sample",
                ),
                Case(
                    f"{title}, {SEQUENCES} x {LENGTH}", partial(sequences, **of), "read"
                ),
                Case(f"{title}, open", partial(opening, **of), "open", "ms"),
            ]
    return rows
