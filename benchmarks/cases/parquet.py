"""Datasets: sizes, random frames, sequences, opening, writing; beside the old format.

"memory" is the same frames in one TensorDict. A row's frames are at most 20,000
collected ones, written as often as needed, each time as a run. MB of a row is the size
on disk of 1,000,000 frames, so it is the number of bytes of a frame. Files are in the
page cache, except in the row with a limit of memory, whose process has a control group
of its own; that needs root. Rows with 1,000,000 frames and more need minutes to begin.
"""

import atexit
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.turns import Alternative
from tensordict import TensorDict

from cases.case import Case
from marl_collect import Collector, MultiSyncCollector, describe
from marl_collect.cli.tasks import find_factory
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.description import DatasetDescription
from marl_collect.storage.parquet.dataset import open_dataset as open_parquet
from marl_collect.storage.parquet.writer import Writer as ParquetWriter
from marl_collect.storage.recording import BackgroundWriter
from marl_collect.storage.writer import Writer as OldWriter

SPREAD = "simple_spread_v3"
TASKS = {
    SPREAD: (10_000, 100_000, 1_000_000),
    "connect_four_v3": (10_000,),
    "knights_archers_zombies_v11": (10_000,),
    "coins": (2_000,),
    "commons_harvest__open": (1_000,),
}
"""Tasks with the numbers of frames of their rows."""
COLLECTED, BATCH = 20_000, 2_000
SAMPLE, SEQUENCES, LENGTH = 256, 32, 50
MEMORY, LARGER_THAN_MEMORY = 2**30, 10_000_000
WRITERS: dict[str, Any] = {"format 3": OldWriter, "Parquet": ParquetWriter}
OPENERS: dict[str, Any] = {"format 3": open_dataset, "Parquet": open_parquet}


@functools.cache
def folder() -> Path:
    """Return the folder of this process for all files."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def batches(task: str, size: int = BATCH) -> tuple[DatasetDescription, list[Any]]:
    """Return collected batches, and their description."""
    factory = find_factory(task, {})
    count = min(COLLECTED, max(TASKS[task])) if size == BATCH else 2_000 * size
    with Collector(
        [factory] * 4, seed=0, frames_per_batch=min(size, count), total_frames=count
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


def files(path: Path) -> list[Path]:
    """Return the files of a dataset without those of its cache."""
    return [p for p in path.rglob("[!.]*") if p.is_file() and ".cache" not in p.parts]


def writing(stack: ExitStack, task: str, size: int = BATCH) -> dict[str, Alternative]:
    """Return the writing of some batches, with the sizes of all of them.

    "not closed" has the size before the last small files are joined.
    """
    about, data = batches(task, size)
    frames = sum(batch.numel() for batch in data)
    some = data[:200]

    def add_all(name: str, path: Path, data: list[Any]) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        writer = WRITERS[name](path, about)
        for batch in data:
            writer.add(batch)
        return writer

    alternatives = {}
    for name in WRITERS:
        path = folder() / f"{name} {task} {size}"
        writer = stack.enter_context(add_all(name, path, data))
        for title in (f"{name}, not closed", name):
            if title == name:
                writer.close()
            parts = files(path)
            nbytes = float(sum(part.stat().st_size for part in parts)) / frames * 1e6

            def call(name: str = name, title: str = title) -> float:
                writer = add_all(name, folder() / "again", some)
                if title == name:
                    writer.close()
                return float(sum(batch.numel() for batch in some))

            alternatives[f"{title}, files: {len(parts)}"] = Alternative(
                call, nbytes=partial(float, nbytes)
            )
    return alternatives


@functools.cache
def in_memory(task: str, frames: int) -> TensorDict:
    """Return all frames in one TensorDict."""
    read: Any = written("Parquet", task, frames).transitions[:]
    return TensorDict(read.to_dict(), read.batch_size)


def three_keys(task: str) -> list[Any]:
    """Return an observation, an action and a reward."""
    about, data = batches(task)
    group = next(iter(about.environment.groups))
    keys = [
        *[(group, "observation"), (group, "observation", "RGB")],
        *[(group, "action"), ("next", group, "reward")],
    ]
    leaves = data[0].keys(include_nested=True, leaves_only=True)
    return [key for key in keys if key in leaves]


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


def collecting(stack: ExitStack) -> dict[str, Alternative]:
    """Return the collection in two workers, without and with writing."""
    about, _ = batches(SPREAD)
    alternatives = {}
    for name in ("without writing", *WRITERS):
        collector = stack.enter_context(
            MultiSyncCollector(
                find_factory(SPREAD, {}), num_workers=2, frames_per_batch=BATCH, seed=0
            )
        )
        add: Callable[[Any], object] = id
        if name in WRITERS:
            writer = WRITERS[name](folder() / f"{name}, collected", about)
            add = stack.enter_context(BackgroundWriter(writer)).add

        def call(collector: Any = collector, add: Any = add) -> float:
            batch = collector.next()
            add(batch)
            return float(batch.numel())

        alternatives[name] = Alternative(call)
    return alternatives


def larger_than_memory(stack: ExitStack) -> dict[str, Alternative]:
    """Return the reading of random frames by processes with a limit of memory."""
    alternatives = {}
    for name in WRITERS:
        path = folder() / f"{name} {LARGER_THAN_MEMORY}"
        if name == "Parquet":
            copies(path)
        else:
            write(name, SPREAD, LARGER_THAN_MEMORY, path)
        OPENERS[name](path).transitions.sample(1)
        alternatives[name] = Alternative.once(stack.enter_context(limited(name, path)))
    return alternatives


def copies(path: Path) -> None:
    """Put links to a file into a folder, each as a run of its own."""
    (file,) = files(written("Parquet", SPREAD, COLLECTED).path)
    path.mkdir()
    time_and_random, _, numbers = file.name.rpartition(".")[0].rpartition(".")
    for number in range(LARGER_THAN_MEMORY // COLLECTED):
        run = f"{time_and_random[:-8]}{number:08x}"
        os.link(file, path / f"{run}.{numbers}.parquet")


@contextmanager
def limited(name: str, path: Path) -> Iterator[Callable[[], object]]:
    """Yield a function that samples in a process whose memory is limited.

    Raises:
        ImportError: if there is no control group for memory, or no right to make one.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = {line.split(":")[1]: line.split(":")[2] for line in lines}
    if "memory" not in groups:
        raise ImportError("a control group for memory")
    group = Path(f"/sys/fs/cgroup/memory/{groups['memory']}/{name.replace(' ', '')}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(MEMORY))
    except OSError as error:
        raise ImportError(f"a control group for memory ({error})") from error
    code = "from cases.parquet import read_limited; read_limited()"
    with subprocess.Popen(
        [sys.executable, "-c", code, name, str(path), str(group)],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def sample() -> None:
            requests.write(b"%d\n" % SAMPLE)
            requests.flush()
            if not answers.readline():
                raise RuntimeError(f"The process that reads {path} has ended.")

        try:
            sample()
            yield sample
        finally:
            process.communicate()
            group.rmdir()


def read_limited() -> None:
    """Sample as often as the standard input asks for a number of frames."""
    name, path, group = sys.argv[1:]
    # What is cached counts as memory.
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    for file in Path(path).rglob("*"):
        if file.is_file():  # Pages that others have read are not of the group.
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    transitions = OPENERS[name](Path(path)).transitions
    for line in sys.stdin:
        print(len(transitions.sample(int(line))), flush=True)


def cases() -> list[Case]:
    """Return the rows of every task."""
    rows = []
    elapsed = time.perf_counter
    for task, sizes in TASKS.items():
        rows.append(Case(f"{task}, write", partial(writing, task=task), "frame"))
        for frames in sizes:
            title = f"{task}, {frames:,} frames"
            of: dict[str, Any] = {"task": task, "frames": frames}
            reads = {
                f"{SAMPLE} random": partial(sampling, few=False, **of),
                f"{SAMPLE} random of three keys": partial(sampling, few=True, **of),
                f"{SEQUENCES} x {LENGTH}": partial(sequences, **of),
            }
            rows += [Case(f"{title}, {what}", reads[what], "read") for what in reads]
            rows.append(Case(f"{title}, open", partial(opening, **of), "open", "ms"))
    return [
        *rows,
        Case("batches of 20 frames", partial(writing, task=SPREAD, size=20), "frame"),
        Case("collect with two workers", collecting, "frame", clock=elapsed),
        Case(
            f"{LARGER_THAN_MEMORY:,} frames in 1 GiB, {SAMPLE} random",
            larger_than_memory,
            "read",
            "ms",
            elapsed,
        ),
    ]
