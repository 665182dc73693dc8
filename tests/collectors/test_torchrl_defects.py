"""Defects of TorchRL 0.14.1 that collectors must not have, each with its test.

A test that covers one is marked `torchrl_defect` with its number, wherever it stands;
those that fit nowhere else are here. `pytest -m torchrl_defect` runs them all.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import run_python
from tests_policies import level_policy
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

DEFECTS = {
    "D1": "trajectory ids change in every step after an agent's death",
    "D2": "a dead agent's action reaches an environment of turns",
    "D2b": "the root is done, but neither terminated nor truncated",
    "D2c": "an agent that terminated is truncated later",
    "D3": "preemption cannot be split, and passes padding off as frames",
    "D3b": "set_truncated flags padding instead of a preempted worker's last frame",
    "D4": "a ParallelEnv that loaded a state is one step late from then on",
    "D5": "a program does not end unless the collector is shut down",
    "D5b": "what transports the weights keeps the interpreter from ending",
    "D6": "publishing weights waits forever for a dead worker",
    "D7": "errors in starting a worker are swallowed",
    "D8": "the error of a worker is lost; a ParallelEnv cannot be closed after it",
    "D10": "frames per worker are ignored in async collection",
    "D11": "async collection drops rollouts that the learner is too slow for",
    "D12": "weights for some workers reach all of them",
    "D13": "optimiser steps reach workers in the middle of a rollout",
    "D15": "equal factories make equal environments, and ids depend on who is faster",
    "D17": "ids come back after a reset",
    "D21": "the last batch comes from a closed environment; bad values are found late",
    "D22": "start method and threads of the user's process are changed",
    "D23": "async workers that are asked for their state deliver nothing any more",
}
KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]
every_kind = pytest.mark.parametrize("kind", KINDS)
workers = pytest.mark.parametrize("kind", KINDS[1:])


def test_every_defect_has_a_test_that_names_it() -> None:
    text = "".join(p.read_text() for p in Path(__file__).parents[1].rglob("test_*.py"))
    marks = re.findall(r"torchrl_defect\(([^)]*)\)", text)
    numbers = {number for mark in marks for number in re.findall(r'"(\w+)"', mark)}
    assert numbers == set(DEFECTS)


class Untransportable:
    """A factory, or part of a policy, whose pickling raises a given error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self) -> CountingEnv:
        return CountingEnv()

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.torchrl_defect("D7")
@workers
@pytest.mark.parametrize(
    "error",
    [
        TypeError("some type"),
        ValueError("some value"),
        pickle.PicklingError("some object"),
        AttributeError("some attribute"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_pickling_are_raised_before_anything_starts(
    kind: Any, error: Exception
) -> None:
    with pytest.raises(TypeError, match=f"worker 1 .*{error}"):
        kind([CountingEnv, Untransportable(error)], frames_per_batch=8)
    policy = level_policy()
    policy.held = Untransportable(error)
    message = f"{type(error).__name__}.*{error}.*policy_factory"
    with pytest.raises(TypeError, match=f"(?s){message}"):
        kind(CountingEnv, policy, num_workers=1, frames_per_batch=8)


@pytest.mark.torchrl_defect("D21")
@every_kind
def test_environments_stay_open_until_the_last_batch_is_taken(kind: Any) -> None:
    with kind(
        [CountingEnv] * 2, frames_per_batch=10, total_frames=30, seed=0
    ) as collector:
        for _ in range(3):
            assert collector.next() is not None
            closed = collector.getattr_env("is_closed")
            assert torch.tensor(closed).logical_not().all()
        assert collector.next() is None


UNTOUCHED = """
import multiprocessing, os, signal, torch
from marl_collect import MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from workloads.counting import CountingEnv

torch.set_num_threads(2)

def surroundings():
    return {
        "start method": multiprocessing.get_start_method(allow_none=True),
        "torch's start method": torch.multiprocessing.get_start_method(allow_none=True),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "threads": torch.get_num_threads(),
        "children": multiprocessing.active_children(),
        "handlers": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
    }

before = surroundings()
pairs = (MultiSyncCollector, "forkserver"), (MultiAsyncCollector, "spawn")
for kind, start_method in pairs:
    options = dict(frames_per_batch=8, start_method=start_method, seed=0)
    with kind([CountingEnv], **options) as c:
        c.next()
        during = surroundings()
        assert during == before, (kind, start_method, during, before)
    assert surroundings() == before
with ParallelEnv(2, CountingEnv) as env:
    env.rollout(2)
    during = surroundings() | {"random": before["random"]}  # Its policy acts here.
    assert during == before, (during, before)
assert before["start method"] is None
print("untouched")
"""


@pytest.mark.timeout(320)  # Four processes import torch one after another.
@pytest.mark.torchrl_defect("D22")
def test_the_users_process_is_not_changed() -> None:
    process = run_python("-c", UNTOUCHED, timeout=300)
    assert process.stdout == "untouched\n", process.stderr
