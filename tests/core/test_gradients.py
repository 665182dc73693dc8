"""Environments and policies that use autograd are told how, or work with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.core.gradients import without_gradients

ENABLE = "torch.enable_grad"


def slope() -> float:
    """Return the derivative of the square at 1."""
    x = torch.ones((), requires_grad=True)
    x.square().backward()
    assert x.grad is not None
    return float(x.grad)


def slope_by_function() -> float:
    x = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(x.square(), x)
    return float(gradient)


class StepsAlong(CountingEnv):
    """Computes a gradient in each step."""

    gradient: Callable[[], float] = staticmethod(slope)

    def step_row(self) -> None:
        assert type(self).gradient() == 2.0
        super().step_row()


class StepsByFunction(StepsAlong):
    gradient = staticmethod(slope_by_function)


class ResetsAlong(CountingEnv):
    def reset_row(self, seed: int) -> None:
        slope()
        super().reset_row(seed)


class Enables(StepsAlong):
    @torch.enable_grad()
    def step_row(self) -> None:
        super().step_row()


def act(td: TensorDictBase) -> TensorDictBase:
    td["prey", "action"] = td["prey", "observation"][..., :2] * slope() / 99
    td["hunter", "action"] = td["hunter", "observation"][..., 0].long() % 4
    return td


def collect(env: Any, policy: Any = None, kind: Any = Collector) -> None:
    with kind([env] * 2, policy, frames_per_batch=60) as collector:
        collector.next()


COLLECTING: dict[str, Callable[[], Any]] = {
    "Collector": lambda: collect(StepsAlong),
    "autograd.grad": lambda: collect(StepsByFunction),
    "MultiSyncCollector": lambda: collect(StepsAlong, kind=MultiSyncCollector),
    "a reset in a worker": lambda: collect(ResetsAlong, kind=MultiSyncCollector),
    "env.rollout": lambda: StepsAlong().rollout(3),
    "a policy": lambda: collect(CountingEnv, act),
    "a policy in a worker": lambda: collect(CountingEnv, act, MultiSyncCollector),
}


@pytest.mark.parametrize("name", COLLECTING)
def test_an_error_of_autograd_says_how_to_enable_it(name: str) -> None:
    with pytest.raises(Exception, match="does not require grad") as error:
        COLLECTING[name]()
    notes = "\n".join(getattr(error.value, "__notes__", []))
    assert ENABLE in f"{error.value}\n{notes}"


def test_an_environment_that_enables_autograd_works() -> None:
    collect(Enables)
    collect(Enables, kind=MultiSyncCollector)


def test_other_errors_have_no_note() -> None:
    raises = pytest.raises(RuntimeError, match="size of tensor")
    with raises as error, without_gradients():
        torch.ones(2) + torch.ones(3)
    assert not hasattr(error.value, "__notes__")
