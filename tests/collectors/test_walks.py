"""The files between a user's call and what it does are few, and they are named.

A profiler notes the stack wherever a walk arrives, in the trainer and in a worker.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests_policies import level_policy
from workloads.counting import CountingEnv, CountingError, Fault

import marl_collect
from marl_collect.collectors import MultiSyncCollector

PACKAGE = Path(marl_collect.__file__).parent
# By walk: the functions at which its parts end, the files that decide, and those that
# only pass a call on.
WALKS = {
    "batch": (
        ["WorkerPool.send_each", "SlotWriter.stepped", "Delivery.batches"],
        "collector teams workers worker loop frame_writer delivery",
        "pool bootstrap forkserver",
    ),
    "weight": (
        [
            *("TrainerPolicy.tensors", "WorkerWeights._write", "WorkerWeights.order"),
            "WorkerPolicy.use",
        ],
        "collector trainer_policy publish workers worker_policy",
        "teams worker bootstrap forkserver",
    ),
    "exception": (
        ["SerialBatch._note", "WorkerContext.fail", "WorkerHandle.next_message"],
        "batch worker context worker_handle workers collector",
        "teams pool loop bootstrap forkserver",
    ),
    "shutdown": (
        ["await_end", "WorkerContext.receive"],
        "collector teams workers pool closing worker bootstrap",
        "context forkserver",
    ),
}
ENDS = {function for functions, _, _ in WALKS.values() for function in functions}


def note_arrivals(file: Path) -> None:
    """Write the functions that end a part of a walk, with the files that led there."""

    def stack(frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                yield path.stem
            frame = frame.f_back

    def profile(frame: FrameType, event: str, _: Any) -> None:
        function = frame.f_code.co_qualname
        if event == "call" and function in ENDS:
            with file.open("a") as lines:
                lines.write(f"{function} {' '.join(stack(frame))}\n")

    sys.setprofile(profile)


def test_walks_have_few_files(tmp_path: Path) -> None:
    in_trainer, in_worker = tmp_path / "trainer", tmp_path / "worker"
    with MultiSyncCollector(
        partial(CountingEnv, fault=Fault("raise", at=30)),
        level_policy(),
        envs_per_worker=2,
        frames_per_batch=8,
        init_fn=partial(note_arrivals, in_worker),
    ) as collector:
        note_arrivals(in_trainer)
        try:
            collector.next()
            collector.update_policy_weights_()
            with pytest.raises(CountingError):  # noqa: PT012
                while True:
                    collector.next()
        finally:
            sys.setprofile(None)
    files: dict[str, set[str]] = {function: set() for function in ENDS}
    for note in (in_trainer, in_worker):
        for line in note.read_text().splitlines():
            function, *names = line.split()
            files[function].update(names)
    for walk, (functions, decide, pass_on) in WALKS.items():
        assert all(files[function] for function in functions), walk
        found = set().union(*(files[function] for function in functions))
        assert found - {*pass_on.split()} == {*decide.split()}, walk
