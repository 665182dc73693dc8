"""A policy with some weights on meta is filled in place, not copied."""

import warnings
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector


class Partly(nn.Module):
    """Has a weight and an unused layer on meta."""

    def __init__(self, unused: nn.Module) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))
        self.unused = unused

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = observation.shape[0]
        hunters = torch.zeros(batch, 2, dtype=torch.int64)
        return self.level.expand(batch, 3, 2), hunters


def policy_of(module: nn.Module) -> TensorDictModule:
    keys = [("prey", "action"), ("hunter", "action")]
    return TensorDictModule(module, in_keys=[("prey", "observation")], out_keys=keys)


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    "unused",
    [
        lambda: nn.Linear(2, 2, device="meta"),
        lambda: nn.LSTM(2, 2, device="meta"),
        lambda: nn.BatchNorm1d(2, device="meta"),
    ],
    ids=["linear", "lstm", "norm"],
)
def test_training_the_passed_module_has_an_effect(
    kind: Any, wrapped: bool, unused: Any
) -> None:
    module = Partly(unused())
    policy = policy_of(module)
    parameters = dict(policy.named_parameters())
    with kind([CountingEnv] * 2, policy, frames_per_batch=8, seed=3) as collector:
        assert collector.policy is policy
        current = dict(policy.named_parameters())
        assert current["module.level"] is parameters["module.level"]
        assert not any(t.is_meta for t in (*current.values(), *policy.buffers()))
        if not isinstance(
            module.unused, nn.LSTM
        ):  # An LSTM keeps weak references to its weights.
            assert all(current[name] is parameters[name] for name in parameters)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        (-module.level).backward()
        optimizer.step()
        collector.update_policy_weights_()
        assert (collector.next()["prey", "action"] == 1.0).all()


def test_ties_and_values_are_kept_and_the_seed_determines_the_rest() -> None:
    def build() -> Partly:
        module = Partly(nn.Linear(2, 2, device="meta"))
        tied: Any = nn.Linear(2, 2, device="meta")
        module.again = tied
        tied.weight = module.unused.weight
        return module

    drawn_weights = []
    for _ in range(2):
        module = build()
        with Collector(CountingEnv, policy_of(module), frames_per_batch=4, seed=3):
            assert module.again.weight is module.unused.weight
            drawn_weights.append(module.unused.weight.detach().clone())
    assert torch.equal(*drawn_weights)


def test_a_tensor_without_an_initialiser_is_refused_and_not_changed() -> None:
    module = Partly(nn.Linear(2, 2, device="meta"))
    module.strange = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"'module\.strange'"):
        Collector(CountingEnv, policy_of(module), frames_per_batch=4)
    assert module.unused.weight.is_meta


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
