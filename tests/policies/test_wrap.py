"""A user's policy is wrapped, used without wrapping, or refused with advice."""

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.optim.swa_utils import AveragedModel
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector


def hunters() -> CountingEnv:
    return CountingEnv(n_prey=0)


class Plain(nn.Module):
    """Takes an argument with the name of the only observation."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.level.long().expand(observation.shape[:-1])


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


def test_of_a_wrapper_the_wrapped_policy_is_asked_for() -> None:
    policy = TensorDictModule(
        Plain(), [("hunter", "observation")], [("hunter", "action")]
    )
    averaged = AveragedModel(policy)
    with pytest.raises(TypeError, match=r"AveragedModel is a wrapper.*policy\.module"):
        Collector(hunters, averaged, frames_per_batch=6)
    with Collector(hunters, policy, frames_per_batch=6) as collector:
        for wrapper, inner in (
            (averaged, "module"),
            (torch.compile(policy), "_orig_mod"),
        ):
            with pytest.raises(KeyError, match=rf"Of a wrapper.*its \.{inner}\."):
                collector.update_policy_weights_(wrapper)
            collector.update_policy_weights_(getattr(wrapper, inner))


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


class Remembers(nn.Module):
    """A lazy layer that reads a hidden state, whose shape the module declares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)
        self.state_shapes = {("prey", "h"): (3, 4)}

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        following = self.layer(torch.cat([x, state], -1)).tanh()
        return following[..., :2], torch.zeros(len(x), 2).long(), following


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_lazy_module_with_a_declared_state_acts(kind: Any) -> None:
    policy = TensorDictModule(
        Remembers(),
        in_keys=[("prey", "observation"), ("prey", "h")],
        out_keys=[("prey", "action"), ("hunter", "action"), ("next", "prey", "h")],
    )
    with kind([CountingEnv] * 2, policy, frames_per_batch=20) as collector:
        batch = collector.next()
    assert batch["prey", "h"].abs().sum() > 0
    assert batch["prey", "h"].shape[-1] == 4


def test_an_assign_that_fails_later_names_itself_and_the_seed() -> None:
    def assign(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
        if seed > 3:
            raise KeyError("lost")
        return dict.fromkeys(agents, "a")

    with (
        Collector(
            CountingEnv,
            policies={"a": None},
            assign=assign,
            frames_per_batch=100,
            seed=9,
        ) as collector,
        pytest.raises(KeyError, match="lost") as excinfo,
    ):
        collector.next()
    notes = excinfo.value.__notes__
    assert any(note.startswith("Raised by assign(seed=") for note in notes)
