"""Environments and policies that use autograd are told how, or work with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv, Fault

from marl_collect import Collector, MultiSyncCollector
from marl_collect.core.gradients import without_gradients

pytestmark = pytest.mark.processes

ENABLE = "torch.enable_grad"


def slope() -> None:
    """Compute the derivative of the square at 1."""
    x = torch.ones((), requires_grad=True)
    x.square().backward()
    assert x.grad == 2.0


def computing(function: Callable[[], None], phase: Any = "step") -> Any:
    """Return a factory of an environment that calls a function in each step."""
    return lambda: CountingEnv(fault=Fault(function, phase, repeat=True))


def act(td: TensorDictBase) -> TensorDictBase:
    slope()
    td["prey", "action"] = td["prey", "observation"][..., :2] / 99
    td["hunter", "action"] = td["hunter", "observation"][..., 0].long() % 4
    return td


def collect(env: Any, policy: Any = None, kind: Any = Collector) -> None:
    with kind([env] * 2, policy, frames_per_batch=60) as collector:
        collector.next()


COLLECTING: dict[str, Callable[[], Any]] = {
    "Collector": lambda: collect(computing(slope)),
    "MultiSyncCollector": lambda: collect(computing(slope), None, MultiSyncCollector),
    "a reset in a worker": lambda: collect(
        computing(slope, "reset"), None, MultiSyncCollector
    ),
    "env.rollout": lambda: computing(slope)().rollout(3),
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
    enabled = computing(torch.enable_grad()(slope))
    collect(enabled)
    collect(enabled, kind=MultiSyncCollector)


class SilentError(RuntimeError):
    def __str__(self) -> str:
        raise AttributeError("this text has another error")


def fail() -> None:
    raise SilentError


@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_error_whose_text_fails_is_not_hidden(kind: Any) -> None:
    with pytest.raises(SilentError):
        collect(computing(fail), kind=kind)


def test_other_errors_have_no_note() -> None:
    raises = pytest.raises(RuntimeError, match="size of tensor")
    with raises as error, without_gradients():
        torch.ones(2) + torch.ones(3)
    assert not hasattr(error.value, "__notes__")
