"""Alternating parts of a batch give the same data as one rollout."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from workloads.counting import CountingEnv

from marl_collect.buffers.layout import STEP_COUNT, TRAJ_IDS, VERSION, batch_fields
from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import allocate
from marl_collect.core.signature import PolicySignature
from marl_collect.parallel_env import ParallelEnv, SerialEnv
from marl_collect.policies.runner import RandomRunner
from marl_collect.rollout.alternating import AlternatingRollout, make_rollout
from marl_collect.rollout.episodes import Plan
from marl_collect.rollout.loop import Rollout
from marl_collect.rollout.progress import ProgressReporter

pytestmark = pytest.mark.processes


ENVIRONMENTS = 5
PLAN = Plan(seed=4, environments=range(10, 10 + ENVIRONMENTS), max_frames_per_traj=7)


def make() -> Any:
    return CountingEnv(action_mask=True, state=True)


@pytest.fixture
def parallel() -> Iterator[Any]:
    with ParallelEnv(ENVIRONMENTS, make, num_processes=2, groups=2) as env:
        yield env.engine()


@pytest.fixture
def serial() -> Iterator[Any]:
    with SerialEnv(ENVIRONMENTS, make) as env:
        yield env.engine()


def rollouts(engine: EnvBatch, progress: Any = None) -> Any:
    engines = engine.parts()
    policies = [RandomRunner(engine.description) for _ in engines]
    return make_rollout(engines, policies, PLAN, progress or ProgressReporter())


def slot(engine: Any, frames: int) -> Any:
    contents = {TRAJ_IDS, STEP_COUNT, VERSION}
    signature = PolicySignature(engine.description.actions())
    fields = batch_fields(engine.description, signature, contents)
    return allocate(fields, (ENVIRONMENTS, frames))


def equal(first_slot: Any, second_slot: Any) -> None:
    assert first_slot.keys() == second_slot.keys()
    for key in first_slot:
        np.testing.assert_array_equal(
            first_slot[key], second_slot[key], err_msg=str(key)
        )


def test_a_batch_of_one_part_is_one_rollout(serial: Any, parallel: Any) -> None:
    assert isinstance(rollouts(serial), Rollout)
    assert isinstance(rollouts(parallel), AlternatingRollout)


def test_states_can_be_exchanged_between_both(serial: Any, parallel: Any) -> None:
    serial_rollout, alternating = rollouts(serial), rollouts(parallel)
    alternating.collect(slot(parallel, 9))
    state = alternating.state()
    serial_rollout.load(state)
    serial_slot, parallel_slot = slot(serial, 9), slot(parallel, 9)
    serial_rollout.collect(serial_slot)
    alternating.collect(parallel_slot)
    equal(serial_slot, parallel_slot)
    alternating.load(state)
    alternating.collect(again := slot(parallel, 9))
    equal(again, parallel_slot)


def test_all_parts_end_at_the_same_frame(parallel: Any) -> None:
    class Impatient(ProgressReporter):
        looks = steps = 0

        def stepping(self) -> None:
            self.steps += 1

        def preempted(self) -> Any:
            self.looks += 1
            return self.looks > 4

    progress = Impatient()
    frames = rollouts(parallel, progress).collect(slot(parallel, 50)).frames
    assert 0 < frames < 50
    assert progress.steps == frames
