"""Which parts of a policy are pure, and when a recording becomes invalid."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector
from marl_collect.policies.fused.recordable import says_pure, why_not_recordable


class Pure(nn.Module):
    pure_forward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Inherits(Pure):
    pass


class Overrides(Pure):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class SaysAgain(Overrides):
    pure_forward = True


def test_a_subclass_that_overrides_forward_must_declare_it_again() -> None:
    assert [says_pure(kind()) for kind in (Pure, Inherits, Overrides, SaysAgain)] == [
        True,
        True,
        False,
        True,
    ]


class Acts(nn.Module):
    pure_forward = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., :2] / 2000, torch.zeros(len(x), 2, dtype=torch.int64)


@pytest.mark.processes
def test_a_class_sent_by_value_keeps_what_it_declares_again() -> None:
    """cloudpickle leaves out attributes that equal those of the base."""

    class Again(Acts):
        pure_forward = True

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x)

    keys = [("prey", "action"), ("hunter", "action")]
    policy = TensorDictModule(Again(), [("prey", "observation")], keys)
    with MultiSyncCollector([CountingEnv], policy, frames_per_batch=9) as collector:
        collector.next()
        (text,) = collector.explain()
    assert text.startswith("Fused")


@pytest.mark.parametrize(
    ("called", "pure"),
    [
        (torch.tanh, True),
        (nn.functional.softplus, True),
        (lambda x: x, False),
        (input, False),
        (nn.Tanh(), True),
        (Overrides(), False),
    ],
)
def test_functions_of_torch_are_pure_and_others_declare_it(
    called: Callable[[torch.Tensor], torch.Tensor], pure: bool
) -> None:
    module = TensorDictModule(called, ["x"], ["y"])
    assert (why_not_recordable(module) is None) == pure


def drawing_from_a_distribution_of_the_users_own() -> nn.Module:
    class Mine(torch.distributions.Normal):
        pass

    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["x"], distribution_class=Mine
    )


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (Overrides(), "Overrides"),
        (TensorDictModule(lambda x: input(x) or x, ["x"], ["y"]), "<lambda>"),
        (drawing_from_a_distribution_of_the_users_own(), "Mine"),
        (lambda td: td, "<lambda>"),
    ],
)
def test_undeclared_parts_are_named_with_the_remedy(policy: Any, name: str) -> None:
    reason = str(why_not_recordable(policy))
    assert f"{name}" in reason
    assert "if it computes from inputs and weights alone" in reason
    assert "pure_forward = True" in reason


def test_the_users_module_is_named_before_ours() -> None:
    class Ours(nn.Module):
        __module__ = "marl_collect.interop.benchmarl"

    class Theirs(nn.Module):
        pass

    reason = str(why_not_recordable(nn.Sequential(Ours(), Theirs())))
    assert reason.startswith("1 (")
    assert "Theirs" in reason
    assert "Ours" in str(why_not_recordable(nn.Sequential(Ours())))


def test_policies_on_other_devices_are_not_recordable() -> None:
    assert "is on meta" in str(why_not_recordable(nn.Linear(2, 2, device="meta")))
