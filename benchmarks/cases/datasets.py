"""Datasets: sizes, random frames, sequences, opening, writing, beside memory.

"memory" is the same frames in one TensorDict. A row's frames are at most 20,000
collected ones, written as often as needed, with other numbers of trajectories. MB of a
row is the size on disk of 1,000,000 frames, so it is the number of bytes of a frame.
Files are in the page cache, except in the row with a limit of memory, whose process has
a control group of its own; that needs root. Rows with 1,000,000 frames and more need
minutes to begin.
"""

import atexit
import functools
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
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness.turns import Alternative
from tensordict import TensorDict

from cases.case import Case
from marl_collect import Collector, MultiSyncCollector, describe
from marl_collect.cli.tasks import find_factory
from marl_collect.storage import (
    BackgroundWriter,
    Dataset,
    DatasetDescription,
    Writer,
    open_dataset,
)
from marl_collect.storage.files import file_name, list_files, write_table

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
SMALL, SMALL_BATCHES = 20, 2_000
SAMPLE, SEQUENCES, LENGTH = 256, 32, 50
MEMORY, LARGER_THAN_MEMORY = 2**30, 10_000_000


@functools.cache
def folder() -> Path:
    """Return the folder of this process for all files."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def batches(task: str, *, small: bool = False) -> tuple[DatasetDescription, list[Any]]:
    """Return collected batches, and their description."""
    factory = find_factory(task, {})
    size, count = SMALL, SMALL * SMALL_BATCHES
    if not small:
        count = min(COLLECTED, max(TASKS[task]))
        size = min(BATCH, count)
    with Collector(
        [factory] * 4, seed=0, frames_per_batch=size, total_frames=count
    ) as collector:
        data = [batch.clone() for batch in collector]
    return DatasetDescription(task, describe(factory)), data


@functools.cache
def written(task: str, frames: int) -> Dataset:
    """Return a dataset, written as one run and opened once."""
    about, data = batches(task)
    path = folder() / f"{task} {frames}"
    with Writer(path, about) as writer:
        for number in range(frames // data[0].numel()):
            repetition, part = divmod(number, len(data))
            batch = data[part].copy()
            ids = batch["collector", "traj_ids"]
            batch["collector", "traj_ids"] = ids + (repetition << 48)
            writer.add(batch)
    return open_dataset(path)


def files(path: Path) -> list[Path]:
    """Return the files of a dataset without those of its cache."""
    return [p for p in path.rglob("[!.]*") if p.is_file() and ".cache" not in p.parts]


def writing(
    stack: ExitStack, task: str, *, small: bool = False
) -> dict[str, Alternative]:
    """Return the writing of some batches, with the sizes of all of them.

    "not closed" has the size before the last small files are joined.
    """
    about, data = batches(task, small=small)
    frames = sum(batch.numel() for batch in data)

    def add_all(path: Path, data: list[Any]) -> Writer:
        shutil.rmtree(path, ignore_errors=True)
        writer = Writer(path, about)
        for batch in data:
            writer.add(batch)
        return writer

    def add_some(*, closes: bool) -> float:
        some = data[:200]
        writer = add_all(folder() / "again", some)
        if closes:
            writer.close()
        return float(sum(batch.numel() for batch in some))

    path = folder() / f"{task}, {len(data)} batches"
    writer = stack.enter_context(add_all(path, data))
    alternatives = {}
    for name in ("not closed", "closed"):
        if name == "closed":
            writer.close()
        parts = files(path)
        nbytes = sum(part.stat().st_size for part in parts) / frames * 1e6
        alternatives[f"{name}, files: {len(parts)}"] = Alternative(
            partial(add_some, closes=name == "closed"), nbytes=partial(float, nbytes)
        )
    return alternatives


@functools.cache
def in_memory(task: str, frames: int) -> TensorDict:
    """Return all frames in one TensorDict."""
    read: Any = written(task, frames).transitions[:]
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
    transitions = written(task, frames).transitions
    transitions = transitions.select(*keys) if few else transitions
    return {
        "memory": Alternative.once(
            lambda: memory[torch.randint(len(memory), (SAMPLE,))]
        ),
        "dataset": Alternative.once(partial(transitions.sample, SAMPLE)),
    }


def sequences(_: ExitStack, task: str, frames: int) -> dict[str, Alternative]:
    """Return the reading of random sequences."""
    memory, transitions = in_memory(task, frames), written(task, frames).transitions
    steps = torch.arange(LENGTH)

    def numbers() -> torch.Tensor:
        return torch.randint(frames - LENGTH, (SEQUENCES, 1)).add(steps)

    return {
        "memory": Alternative.once(lambda: memory[numbers()]),
        "dataset": Alternative.once(lambda: transitions[numbers().reshape(-1)]),
    }


def opening(_: ExitStack, task: str, frames: int) -> dict[str, Alternative]:
    """Return the opening of a dataset whose cache is complete, and of a new one."""
    path = Path(written(task, frames).name)

    def anew() -> None:
        shutil.rmtree(path / ".cache")
        open_dataset(path)

    return {
        "later": Alternative.once(lambda: open_dataset(path).trajectories),
        "first": Alternative.once(anew),
    }


def collecting(stack: ExitStack) -> dict[str, Alternative]:
    """Return the collection in two workers, without and with writing."""
    about, _ = batches(SPREAD)
    writer = BackgroundWriter(Writer(folder() / "collected", about))
    calls: dict[str, Callable[[Any], object]] = {
        "without writing": id,
        "with writing": stack.enter_context(writer).add,
    }
    alternatives = {}
    for name, use in calls.items():
        collector = stack.enter_context(
            MultiSyncCollector(
                find_factory(SPREAD, {}), num_workers=2, frames_per_batch=BATCH, seed=0
            )
        )

        def call(collector: Any = collector, use: Any = use) -> float:
            batch = collector.next()
            use(batch)
            return float(batch.numel())

        alternatives[name] = Alternative(call)
    return alternatives


def larger_than_memory(stack: ExitStack) -> dict[str, Alternative]:
    """Return the reading of random frames by a process with a limit of memory."""
    path = folder() / f"{LARGER_THAN_MEMORY}"
    (part,) = list_files(Path(written(SPREAD, COLLECTED).name))
    table = pq.read_table(part.path)
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    for number in range(LARGER_THAN_MEMORY // COLLECTED):  # Each as a run of its own.
        run = f"{part.run[:-8]}{number:08x}"
        column = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int32), [run])
        table = table.set_column(0, table.schema.field(0), column)
        write_table(table, file_name(run, 0, part.last), descriptor, path)
    os.close(descriptor)
    open_dataset(path)
    return {"dataset": Alternative.once(stack.enter_context(limited(path)))}


@contextmanager
def limited(path: Path) -> Iterator[Callable[[], object]]:
    """Yield a function that samples in a process whose memory is limited.

    Raises:
        ImportError: if there is no control group for memory, or no right to make one.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = {line.split(":")[1]: line.split(":")[2] for line in lines}
    if "memory" not in groups:
        raise ImportError("a control group for memory")
    group = Path(f"/sys/fs/cgroup/memory/{groups['memory']}/benchmark-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(MEMORY))
    except OSError as error:
        raise ImportError(f"a control group for memory ({error})") from error
    code = f"from {__name__} import read_limited; read_limited()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(group)],
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
    path, group = sys.argv[1:]
    # What is cached counts as memory.
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    for file in Path(path).rglob("*"):
        if file.is_file():  # Pages that others have read are not of the group.
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    transitions = open_dataset(path).transitions
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
        Case(
            f"{SMALL_BATCHES:,} batches of {SMALL} frames, write",
            partial(writing, task=SPREAD, small=True),
            "frame",
        ),
        Case("collect with two workers", collecting, "frame", clock=elapsed),
        Case(
            f"{LARGER_THAN_MEMORY:,} frames in 1 GiB, {SAMPLE} random",
            larger_than_memory,
            "read",
            "ms",
            elapsed,
        ),
    ]
