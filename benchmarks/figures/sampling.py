"""Sampling 256 random transitions of a dataset of 20,000 frames.

The dataset is read through memory maps. Beside it stands indexing the same transitions
of a TensorDict in memory, which no dataset on a disk can be faster than.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness.served import System
from harness.windows import Answer, Measure
from workloads.adapters import our_factory

from marl_collect.storage import record

_FRAMES = 20_000
_SAMPLE = 256


def build(system: System) -> Measure:
    """Return a measure with microseconds per sample."""
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory(prefix="marl_collect_sampling_")
    dataset = record(
        Path(folder.name) / "data", our_factory(system.workload), frames=_FRAMES, seed=0
    )
    transitions = dataset.transitions
    in_memory = transitions[:].clone()

    def index() -> object:
        return in_memory[torch.randint(len(in_memory), (_SAMPLE,))]

    def measure(seconds: float) -> Answer:
        sampled, indexed = [], []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            sampled.append(_seconds(lambda: transitions.sample(_SAMPLE)))
            indexed.append(_seconds(index))
        return {
            "sample_us": statistics.median(sampled) * 1e6,
            "index_in_memory_us": statistics.median(indexed) * 1e6,
            "dataset_mb": _size(Path(folder.name)) / 1e6,
        }

    return measure


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
