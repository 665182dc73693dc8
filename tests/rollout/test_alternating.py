"""Alternating parts of a batch give the same data as one rollout."""

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect.buffers.layout import BatchContents, batch_fields
from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import allocate
from marl_collect.core.signature import PolicySignature
from marl_collect.parallel_env import ParallelEnv, SerialEnv
from marl_collect.policies.runner import RandomRunner
from marl_collect.rollout.alternating import AlternatingRollout, make_rollout
from marl_collect.rollout.episodes import Plan
from marl_collect.rollout.loop import ProgressReporter, Rollout

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

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
    return make_rollout(engines, policies, PLAN, progress)


def slot(engine: Any, frames: int, *, compact: bool = False) -> Any:
    contents = BatchContents(step_count=True, policy_version=True, compact_obs=compact)
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


def test_slots_and_episodes_are_the_same(serial: Any, parallel: Any) -> None:
    serial_rollout, alternating = rollouts(serial), rollouts(parallel)
    for version in range(3):
        serial_slot, parallel_slot = slot(serial, 11), slot(parallel, 11)
        frames, episodes = serial_rollout.collect(serial_slot, version)
        result = alternating.collect(parallel_slot, version)
        equal(serial_slot, parallel_slot)
        assert result[0] == frames
        assert sorted(map(repr, result[1])) == sorted(map(repr, episodes))
        assert alternating.running == serial_rollout.running
    assert alternating.take_reset_seconds() > 0


def last_by_row(rollout: Any) -> dict[tuple[Any, int, int], list[Any]]:
    """Return each observation that a slot lacks, by key, environment and frame."""
    return {
        (key, int(row), last.frame): values[k].tolist()
        for last in rollout.take_last()
        for key, values in last.observations.items()
        for k, row in enumerate(last.rows)
    }


def test_both_have_the_observations_that_a_compact_slot_lacks(
    serial: Any, parallel: Any
) -> None:
    serial_rollout, alternating = rollouts(serial), rollouts(parallel)
    for _ in range(2):
        serial_rollout.collect(slot(serial, 11, compact=True))
        alternating.collect(slot(parallel, 11, compact=True))
        expected = last_by_row(serial_rollout)
        assert last_by_row(alternating) == expected
        assert {row for _, row, _ in expected} == set(range(ENVIRONMENTS))


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


def test_reset_and_reseed_reach_every_part(serial: Any, parallel: Any) -> None:
    serial_rollout, alternating = rollouts(serial), rollouts(parallel)
    for rollout in (serial_rollout, alternating):
        rollout.reset()
        rollout.reset([1, 4])
    assert alternating.running == serial_rollout.running == (0, 1, 0, 0, 1)
    for rollout in (serial_rollout, alternating):
        rollout.reseed(77)
    serial_slot, parallel_slot = slot(serial, 6), slot(parallel, 6)
    serial_rollout.collect(serial_slot)
    alternating.collect(parallel_slot)
    equal(serial_slot, parallel_slot)


def test_all_parts_end_at_the_same_frame(parallel: Any) -> None:
    class Impatient(ProgressReporter):
        looks = steps = 0

        def stepping(self) -> None:
            self.steps += 1

        def preempted(self) -> Any:
            self.looks += 1
            return self.looks > 4

    progress = Impatient()
    frames, _ = rollouts(parallel, progress).collect(slot(parallel, 50))
    assert 0 < frames < 50
    assert progress.steps == frames


def test_a_policy_in_the_trainer_is_shared_by_the_parts() -> None:
    from marl_collect.collectors import Collector

    def act(td: TensorDictBase) -> Any:
        td["hunter", "action"] = (td["hunter", "observation"][..., 0] * 1009).long() % 4
        td["prey", "action"] = td["prey", "observation"][..., :2]
        return td

    def data(factory: Any) -> Any:
        with Collector(
            factory, act, frames_per_batch=50, total_frames=150, seed=1
        ) as collector:
            return torch.cat([batch.clone() for batch in collector], 1)

    serial_batch = data([make] * ENVIRONMENTS)
    parallel_batch = data(
        lambda: ParallelEnv(ENVIRONMENTS, make, num_processes=2, groups=5)
    )
    assert (serial_batch == parallel_batch).all()
