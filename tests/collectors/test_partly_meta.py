"""A policy with only some weights on meta is refused; training a copied one warns."""

import warnings
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.models import materialize


def policy_of(module: nn.Module) -> TensorDictModule:
    keys = [("prey", "action"), ("hunter", "action")]
    return TensorDictModule(module, in_keys=[("prey", "observation")], out_keys=keys)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_module_of_which_only_a_part_is_on_meta_is_refused(kind: Any) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 2, device="meta")
    policy = policy_of(nn.Sequential(first, second))
    with pytest.raises(ValueError, match=r"'module\.1\.weight'.*materialize"):
        kind([CountingEnv] * 2, policy, frames_per_batch=8)
    assert second.weight.is_meta
    whole = materialize(policy, seed=0)
    assert torch.equal(whole.module[0].weight, first.weight)
    assert not whole.module[1].weight.is_meta


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_training_a_module_that_was_copied_causes_a_warning(kind: Any) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LazyLinear(2)

        def forward(self, observation: torch.Tensor) -> Any:
            batch, action = observation.shape[:-2], self.layer(observation)
            return action, torch.zeros(*batch, 2, dtype=torch.int64)

    policy = policy_of(Lazy())
    with kind([CountingEnv] * 2, policy, frames_per_batch=8) as collector:
        assert collector.policy is not policy
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collector.update_policy_weights_()
            batch = collector.next()
        policy(batch.clone())
        with pytest.warns(UserWarning, match=r"Train collector\.policy"):
            collector.update_policy_weights_()
