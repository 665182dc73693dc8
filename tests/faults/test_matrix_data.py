"""Rows of the fault matrix about inputs and outputs of collectors."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import KINDS, faulty
from support.clocks import LIMIT, Clock, beside, waits
from support.processes import SOON, wait_until
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector
from marl_collect.parallel_env import ParallelEnv

every_kind = pytest.mark.parametrize("kind", [Collector, *KINDS])
workers = pytest.mark.parametrize("kind", KINDS)
one_hunter_short = partial(CountingEnv, n_hunters=1)


def no_prey(td: TensorDictBase) -> TensorDictBase:
    return td.set(("hunter", "action"), torch.zeros(td.shape[0], 2, dtype=torch.int64))


def wrong_prey(td: TensorDictBase) -> TensorDictBase:
    return no_prey(td).set(("prey", "action"), torch.zeros(td.shape[0], 3, 5))


@every_kind
@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (no_prey, KeyError, "prey/action"),
        (wrong_prey, ValueError, r"prey/action has shape \[3, 5\] .* expects \[3, 2\]"),
    ],
    ids=["missing", "shape"],
)
def test_missing_entries_of_a_policy_are_reported_at_the_start(
    kind: Any, policy: Any, error: type[Exception], words: str
) -> None:
    """Row 15."""
    with pytest.raises(error, match=words):
        kind([CountingEnv], policy, frames_per_batch=8)


@workers
def test_different_environments_of_workers_are_reported_at_the_start(kind: Any) -> None:
    """Row 18."""
    with pytest.raises(ValueError, match=r"worker 1.*worker 0"):
        kind([CountingEnv, one_hunter_short], frames_per_batch=8)


def test_a_factory_that_cannot_be_pickled_is_refused_before_any_process_starts(
    tmp_path: Path,
) -> None:
    """Row 21, for ParallelEnv."""
    with (tmp_path / "open").open("w") as file:
        factory = lambda: CountingEnv(n_prey=file.fileno())  # noqa: E731
        with pytest.raises(TypeError, match="to its process: .* variable 'file' of"):
            ParallelEnv(2, factory, num_processes=2).reset()


@pytest.mark.filterwarnings("ignore:More than .* batches are held")
@every_kind
def test_a_loop_can_be_left_and_continued_and_ends_once(kind: Any) -> None:
    """Row 29: two iterators share the batches, and the loop ends once."""
    collector = kind([CountingEnv] * 2, frames_per_batch=10, total_frames=80)
    frames = 0
    for batch in collector:
        frames += batch.numel()
        break
    first, second = iter(collector), iter(collector)
    frames += next(first).numel() + next(second).numel() + collector.next().numel()
    frames += sum(batch.numel() for batch in first)
    assert frames == 80
    assert list(second) == []
    assert collector.next() is None


@workers
def test_a_collector_can_be_shut_down_while_all_slots_are_held(kind: Any) -> None:
    """Row 29: shutdown does not wait for a free slot."""
    collector = kind([CountingEnv] * 2, frames_per_batch=10)
    batches = [collector.next() for _ in range(2)]
    copies = [batch.clone() for batch in batches]
    collector.shutdown(timeout=SOON)
    for batch, copy in zip(batches, copies, strict=True):
        assert (batch == copy).all()


def test_the_start_of_processes_has_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 34, for ParallelEnv: building may take longer than ``timeout``."""
    clock = Clock(monkeypatch)
    started_file, finish = tmp_path / "started", tmp_path / "finish"

    def build_slowly() -> None:
        wait_until(started_file.exists)
        clock.pass_slowly(5 * LIMIT)
        finish.touch()

    slow = faulty(waits(started_file, finish), "create")
    with beside(build_slowly):
        env = ParallelEnv(
            2, slow, num_processes=2, timeout=LIMIT, start_timeout=100 * LIMIT
        )
    with env:
        env.rollout(2)
