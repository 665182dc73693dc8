"""With prefetch, a worker that is done starts the next batch before the others."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from collector_tools import release_when_preempted, slow_until_preempted
from support.processes import SOON, wait_until
from tests_policies import at_level, level_policy
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.collectors import MultiSyncCollector
from marl_collect.errors import worker_error_of

FRAMES = 10
"""Frames of each of the two environments in a batch."""


def at(step: int, harm: Any, **options: Any) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv(fault=Fault(harm, "step", step, **options))


def slow() -> CountingEnv:
    return CountingEnv(fault=Fault("sleep", repeat=True, seconds=0.005))


def marks(path: Path) -> Callable[[], CountingEnv]:
    """Return a hook that creates a file in the middle of the second batch."""
    return at(FRAMES + 5, path.touch)


def waits(path: Path, *, then: Any = None) -> Callable[[], CountingEnv]:
    """Return a hook that waits in the first batch until the file exists."""

    def strike() -> None:
        wait_until(path.exists)
        if then is not None:
            Fault(then).strike()

    return at(5, strike)


def collector(envs: Any, policy: Any = None, **options: Any) -> MultiSyncCollector:
    options = {"frames_per_batch": 2 * FRAMES, "seed": 0, "timeout": SOON} | options
    return MultiSyncCollector(envs, policy, prefetch=True, **options)


def test_a_worker_that_is_done_starts_its_next_batch_at_once(tmp_path: Path) -> None:
    file = tmp_path / "second batch"
    with collector([marks(file), waits(file)]) as running:
        assert running.next().shape == (2, FRAMES)
        assert file.exists()


def test_a_loop_with_prefetch_needs_three_slots() -> None:
    with collector([CountingEnv, slow]) as running:
        for number, _ in enumerate(running):
            assert running.stats()["slots"] == 3
            if number == 5:
                break


def test_no_batch_is_started_beyond_total_frames() -> None:
    with collector([CountingEnv, slow], total_frames=4 * FRAMES) as running:
        for _ in range(2):
            running.next()
        assert running.steps_so_far() == 4 * FRAMES
        assert running.next() is None


def test_a_preempted_batch_is_counted_before_the_next_one_starts(
    tmp_path: Path,
) -> None:
    """A full first batch would end the random actions."""
    with collector(
        [CountingEnv, slow_until_preempted(tmp_path)],
        at_level(0.5)(),
        init_random_frames=2 * FRAMES,
        preemptive_threshold=0.5,
    ) as running:
        release_when_preempted(running, 1, tmp_path)
        assert running.next()["collector", "mask"].sum() < 2 * FRAMES
        assert running.next()["prey", "action"][0].unique().numel() > 1, "acts already"
        assert (running.next()["prey", "action"][0] == 0.5).all()


def test_a_failure_in_a_prefetched_batch_is_raised_with_that_batch(
    tmp_path: Path,
) -> None:
    file = tmp_path / "failed"

    def fail() -> None:
        file.touch()
        raise CountingError("early")

    running = collector([at(FRAMES + 5, fail), waits(file)])
    assert running.next().shape == (2, FRAMES)
    with pytest.raises(CountingError, match="early") as excinfo:
        running.next()
    cause = worker_error_of(excinfo.value)
    assert cause is not None
    assert cause.worker == 0


@pytest.mark.parametrize("role", ["slow one", "fast one"])
def test_a_worker_is_replaced_while_workers_are_in_two_batches(
    tmp_path: Path, role: str
) -> None:
    """The other worker's rows equal those of a run without the failure."""
    file = tmp_path / "second batch"
    died = tmp_path / "died"

    def die() -> None:
        file.touch()
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    envs = [marks(file), waits(file, then=die)]
    if role == "fast one":
        envs = [at(FRAMES + 5, die), waits(file)]
    lost = 1 if role == "slow one" else 0
    policy = level_policy()
    with (
        collector(envs, policy, on_worker_failure="restart") as actual,
        collector([CountingEnv] * 2, level_policy()) as expected,
    ):
        for _ in range(4):
            batch, other = actual.next(), expected.next()
            assert (batch[1 - lost] == other[1 - lost]).all()
            assert (batch["collector", "traj_ids"][lost] >= lost << 32).all()
            actual.update_policy_weights_()
        assert actual.stats()["restarts"] == 1
