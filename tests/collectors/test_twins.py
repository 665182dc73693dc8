"""All kinds of collectors return the same data for the same environments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector

ENVIRONMENTS = 6


def elementwise_policy(td: TensorDictBase) -> TensorDictBase:
    """Acts with comparisons and short sums, without a matrix product."""
    observation = td.get(("hunter", "observation"))
    td.set(("hunter", "action"), (observation[..., 0] * 1009).long() % 4)
    prey = td.get(("prey", "observation"))
    td.set(("prey", "action"), prey[..., :2] * 2 - 1)
    td.set(("prey", "extra"), prey[..., 1] + prey[..., 2])
    return td


def masked() -> CountingEnv:
    return CountingEnv(action_mask=True, deaths=True, state=True)


def collect(kind: Any, policy: Any, **options: Any) -> TensorDict:
    collector = kind(
        [masked] * ENVIRONMENTS,
        policy,
        frames_per_batch=60,
        total_frames=240,
        max_frames_per_traj=9,
        track_policy_version=True,
        **options,
    )
    return torch.cat([batch.clone() for batch in collector], dim=1)


@pytest.mark.torchrl_defect("D15")
@pytest.mark.parametrize("policy", [None, elementwise_policy], ids=["random", "policy"])
def test_data_do_not_depend_on_the_assignment_of_environments_to_workers(
    policy: Callable[[TensorDictBase], TensorDictBase] | None,
) -> None:
    expected = collect(Collector, policy, seed=3)
    for workers in (1, 2, 3):
        actual = collect(MultiSyncCollector, policy, seed=3, num_workers=workers)
        assert set(actual.keys(True, True)) == set(expected.keys(True, True))
        assert (actual == expected).all(), f"{workers} workers differ"


def test_batch_size_does_not_change_the_data() -> None:
    def run(frames: int) -> TensorDict:
        collector = Collector(
            [masked] * 2, frames_per_batch=frames, total_frames=120, seed=1
        )
        return torch.cat([batch.clone() for batch in collector], dim=1)

    expected = run(120)
    for frames in (2, 20, 40):
        assert (run(frames) == expected).all()


def test_other_seed_gives_other_data() -> None:
    first = collect(Collector, None, seed=0)
    second = collect(Collector, None, seed=1)
    assert not (first["hunter", "action"] == second["hunter", "action"]).all()


def test_torch_seed_makes_an_unseeded_collector_repeat() -> None:
    torch.manual_seed(5)
    first = collect(Collector, None)
    torch.manual_seed(5)
    assert (collect(Collector, None) == first).all()
