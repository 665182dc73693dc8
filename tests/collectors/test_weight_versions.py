"""Policy versions: one counter, and frames that name the weights that acted."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests_policies import at_level, level_policy
from workloads.counting import CountingEnv

from marl_collect.collectors import MultiSyncCollector
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.publish import WorkerWeights
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.weights.shared import WeightVector

WORKERS = 3
KEY = "policy_version"


def levels(batch: Any) -> list[float]:
    return [float(row.flatten()[0]) for row in batch["prey", "action"]]


def versions(batch: Any) -> list[int]:
    rows = batch[KEY]
    assert (rows == rows[:, :1]).all()
    assert torch.equal(rows, batch["next", KEY])
    return [int(row[0]) for row in rows]


def weight(value: float) -> dict[str, torch.Tensor]:
    return {"module.level": torch.tensor(value)}


def sync(policy: Any, **options: Any) -> MultiSyncCollector:
    return MultiSyncCollector(
        [CountingEnv] * WORKERS,
        policy,
        frames_per_batch=4 * WORKERS,
        track_policy_version=True,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "index"),
    [("policy_or_weights", int), ("weights", np.int64), ("policy", int)],
)
def test_different_weights_per_worker_are_one_version(name: str, index: Any) -> None:
    with sync(level_policy()) as collector:
        by_worker: Any = {index(0): weight(5.0), index(2): weight(6.0)}
        collector.update_policy_weights_(**{name: by_worker})
        batch = collector.next()
        assert versions(batch) == [1, 0, 1]
        assert levels(batch) == [5.0, 0.0, 6.0]
        wrong: Any
        boolean: Any = {True: weight(1.0)}
        for wrong in ({"worker_ids": [0]}, {"model_id": "module"}):
            with pytest.raises(ValueError, match="by worker"):
                collector.update_policy_weights_(**{name: by_worker}, **wrong)
        for other in {"policy_or_weights", "weights", "policy", "weights_dict"} - {
            name
        }:
            with pytest.raises(ValueError, match="only one"):
                collector.update_policy_weights_(**{name: by_worker, other: {}})
        with pytest.raises(TypeError, match="indices of workers"):
            collector.update_policy_weights_(**{name: boolean})
        with pytest.raises(ValueError, match="worker 3 of 3"):
            collector.update_policy_weights_(**{name: by_worker | {3: weight(1.0)}})
        with pytest.raises(ValueError, match="no worker"):
            collector.update_policy_weights_(worker_ids=[])
        assert levels(collector.next()) == [5.0, 0.0, 6.0]


def test_weights_of_other_dtypes_are_converted() -> None:
    with sync(None, policy_factory=at_level(1.0)) as collector:
        state = copy.deepcopy(collector.state_dict())
        (published,) = state["published"]
        (name,) = published
        published[name] = torch.tensor(3.0, dtype=torch.float64)
        collector.load_state_dict(state)
        assert levels(collector.next()) == [3.0] * WORKERS


def test_workers_with_equal_weights_save_them_once() -> None:
    with sync(level_policy()) as collector:
        collector.update_policy_weights_(worker_ids=[1])
        assert len(collector.state_dict()["published"]) == 1
        collector.update_policy_weights_({2: weight(3.0)})
        assert len(collector.state_dict()["published"]) == WORKERS


STEPS = st.tuples(
    st.sampled_from(["update", "update one", "order", "read"]),
    st.integers(0, WORKERS - 1),
)


@given(st.lists(STEPS, max_size=30))
def test_no_update_overwrites_weights_that_a_worker_still_has_to_read(
    steps: list[tuple[str, int]],
) -> None:
    last_read = [0] * WORKERS
    orders: list[Any] = [None] * WORKERS  # That each worker has not carried out yet.
    has = [0.0] * WORKERS
    policy = TrainerPolicy(level_policy())
    options = CollectorOptions(CountingEnv, frames_per_batch=1)
    published = WorkerWeights(
        policy, options, WORKERS, WeightVector, last_read.__getitem__
    )
    for worker in range(WORKERS):
        published.policy_for(worker)
    for action, worker in steps:
        if action.startswith("update"):
            value = torch.tensor(float(published.version + 1))
            chosen = [worker] if action == "update one" else None
            published.publish(([value], chosen))
        elif action == "order" and orders[worker] is None:
            orders[worker] = published.order(worker)
        elif action == "read" and orders[worker] is not None:
            order, orders[worker] = orders[worker], None
            if order.weights_slot is not None:
                (level,) = published._vector.tensors(order.weights_slot)
                has[worker] = float(level)
            last_read[worker] = order.order
            assert has[worker] == order.version
    published.close()
