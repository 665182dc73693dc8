"""A user's policy is wrapped, used without wrapping, or refused with advice."""

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector


def hunters() -> CountingEnv:
    return CountingEnv(n_prey=0)


class Plain(nn.Module):
    """Takes an argument with the name of the only observation."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.level.long().expand(observation.shape[:-1])


@pytest.mark.processes
def test_module_whose_argument_is_an_observation_is_wrapped() -> None:
    module = Plain()
    with MultiSyncCollector(hunters, module, frames_per_batch=6) as collector:
        assert (collector.next()["hunter", "action"] == 1).all()
        with torch.no_grad():
            module.level.fill_(2)
        collector.update_policy_weights_(module)
        assert (collector.next()["hunter", "action"] == 2).all()


def test_further_results_of_a_module_have_the_names_of_torchrl() -> None:
    def act(observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        action = observation.sum(-1).long() % 4
        return action, observation * 2, observation[:, 0]

    batch = Collector(hunters, act, frames_per_batch=6).next()
    observation = batch["hunter", "observation"]
    assert (batch["hunter", "action"] == observation.sum(-1).long() % 4).all()
    assert (batch["output1"] == observation * 2).all()
    assert (batch["output2"] == observation[:, :, 0]).all()


@pytest.mark.parametrize("name", ["annotated", "named", "anything"])
def test_a_callable_on_tensordicts_is_not_wrapped(name: str) -> None:
    def annotated(x: TensorDictBase) -> TensorDictBase:
        return x.set(("hunter", "action"), torch.ones(1, 2, dtype=torch.int64))

    def named(td: TensorDictBase) -> Any:
        return annotated(td)

    def anything(td: Any) -> Any:
        return annotated(td)

    policies = {"annotated": annotated, "named": named, "anything": anything}
    policy = policies[name]
    batch = Collector(hunters, policy, frames_per_batch=6).next()
    assert (batch["hunter", "action"] == 1).all()


def test_other_arguments_are_refused_with_the_wrapping() -> None:
    class Other(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels

    with pytest.raises(TypeError, match=r"pixels.*TensorDictModule\(policy, in_keys="):
        Collector(hunters, Other(), frames_per_batch=6)


def test_a_trusted_callable_is_not_checked() -> None:
    def act(whatever: Any) -> Any:
        return whatever.set(("hunter", "action"), torch.zeros(1, 2, dtype=torch.int64))

    with pytest.raises(TypeError, match="whatever"):
        Collector(hunters, act, frames_per_batch=6)
    collector = Collector(hunters, act, frames_per_batch=6, trust_policy=True)
    assert (collector.next()["hunter", "action"] == 0).all()


def test_a_module_in_place_of_a_factory_is_refused() -> None:
    with pytest.raises(TypeError, match="pass it as policy"):
        MultiSyncCollector(hunters, policy_factory=Plain(), frames_per_batch=6)
