"""Which changes of a policy an update refuses; the oracle has those that it sends."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import source_of
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from tests_policies import acting
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.collectors.trainer_policy import WeightWalk
from marl_collect.weights.skeleton import weight_tensors

KINDS: dict[str, Callable[..., Any]] = {
    "single": lambda policy, **options: Collector(
        [CountingEnv] * 2, policy, frames_per_batch=8, **options
    ),
    "sync": lambda policy, **options: MultiSyncCollector(
        [CountingEnv] * 2, policy, frames_per_batch=8, **options
    ),
}
one_process_or_workers = pytest.mark.parametrize("kind", ["single", "sync"])
# Asynchronous collectors compare and publish weights with the code of synchronous
# ones. Only the moment at which a worker reads them differs.


class Sum(nn.Module):
    """Acts with the sum of all its values, so every change is visible."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))
        self.layer = nn.Linear(2, 3)
        self.tied = nn.Linear(2, 3)
        self.tied.bias = self.layer.bias
        self.register_buffer("kept", torch.zeros(2))
        self.function: Callable[[], float] = float
        self.calls = 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        batch = observation.shape[0]
        total = sum(tensor.sum() for tensor in (*self.parameters(), *self.buffers()))
        action = torch.as_tensor(total).detach().expand(batch, 3, 2)
        return action, torch.zeros(batch, 2, dtype=torch.int64)


def action(collector: Any) -> float:
    actions = collector.next()["prey", "action"].unique()
    assert len(actions) == 1
    return float(actions)


def registered(holder: str, name: str, tensor: torch.Tensor | None) -> Any:
    """Return a change that gives a module, or one of its layers, another parameter."""
    parameter = None if tensor is None else nn.Parameter(tensor)
    return lambda net: net.get_submodule(holder).register_parameter(name, parameter)


HALF = r"float16, but must be \(\) torch\.float32"
UNTIED = r"'module\.tied\.bias' and 'module\.layer\.bias' are one tied tensor"
ONES = torch.ones(2)
REFUSED: dict[str, Callable[[Any], object]] = {
    HALF: lambda net: net.half(),
    UNTIED: registered("tied", "bias", torch.ones(3)),
    "more is Linear, but was missing": lambda net: net.add_module(
        "more", nn.Linear(2, 2)
    ),
    "more is ReLU, but was missing": lambda net: net.add_module("more", nn.ReLU()),
    r"surplus \['module\.more'\]": registered("", "more", ONES),
    r"surplus \['module\.tied\.m'\]": lambda net: net.tied.register_buffer("m", ONES),
    r"missing \['module\.layer\.bias'\]": registered("layer", "bias", None),
    r"is \(3, 1\) torch\.float32, but must be \(3, 2\)": registered(
        "layer", "weight", torch.ones(3, 1)
    ),
    r"level is \(1,\) torch\.float32, but must be \(\)": registered(
        "", "level", torch.ones(1)
    ),
    "tied is Identity, but was Linear": lambda net: net.add_module(
        "tied", nn.Identity()
    ),
}
"""What the error about a change of the network says, and the change."""


@pytest.mark.filterwarnings("ignore:The policy's parameters have changed")
@pytest.mark.parametrize(
    ("kind", "message"),
    [*(("single", message) for message in REFUSED), ("sync", HALF), ("sync", UNTIED)],
)
def test_another_network_is_an_error_and_nothing_is_copied(
    kind: str, message: str
) -> None:
    module = Sum()
    with KINDS[kind](acting(module)) as collector:
        collector.next()
        REFUSED[message](module)
        with torch.no_grad():
            module.level.fill_(7.0)
        before = [t.clone() for t in module.state_dict().values()]
        with pytest.raises((ValueError, KeyError), match=message) as excinfo:
            collector.update_policy_weights_()
        assert "Nothing was copied" in str(excinfo.value)
        after = list(module.state_dict().values())
        assert all(map(torch.equal, before, after))
        assert collector.policy_version == 0
        if kind != "single":
            assert action(collector) == 0.0


@one_process_or_workers
def test_passed_weights_are_compared_too(kind: str) -> None:
    module = Sum()
    with KINDS[kind](acting(module)) as collector:
        weights = dict(
            TensorDict.from_module(collector.policy).flatten_keys(".").items()
        )
        good = {name: t.detach().clone() for name, t in weights.items()}
        for name, tensor, error in (
            ("module.level", torch.ones(1), r"level is \(1,\)"),
            ("module.level", torch.ones((), dtype=torch.float64), "float64"),
            ("module.level", torch.ones((), device="meta"), "meta device"),
            ("module.more", torch.ones(1), r"surplus \['module\.more'\]"),
            ("module.tied.bias", torch.ones(3), "one tied tensor"),
            ("module.level", "1.0", "'module.level' is a str"),
        ):
            with pytest.raises((ValueError, KeyError, TypeError), match=error):
                collector.update_policy_weights_({**good, name: tensor})
        del good["module.kept"]
        with pytest.raises(KeyError, match=r"missing \['module\.kept'\]"):
            collector.update_policy_weights_(good)
        assert action(collector) == 0.0
        arrays: dict[str, Any] = {
            name: t.detach().numpy().copy() for name, t in weights.items()
        }
        arrays["module.level"] = np.float32(3.0)
        arrays["module.layer._extra_state"] = {"of": "get_extra_state()"}
        collector.update_policy_weights_(arrays)
        assert action(collector) == 3.0


def test_attributes_that_a_workers_policy_changes_are_not_overwritten() -> None:
    module = Sum()
    with KINDS["sync"](acting(module)) as collector:
        collector.next()
        for _ in range(3):
            module.calls += 1000
            collector.update_policy_weights_()
            before = source_of(collector).attribute("policy", "module")[0].calls
            collector.next()
            after = source_of(collector).attribute("policy", "module")[0].calls
            assert before < after < 1000


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2, bias=False))


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(2, 2, bias=False))


class Inner(nn.Module):
    """Acts with the output of a layer for an input of ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = observation.shape[0]
        action = self.layer(torch.ones(batch, 3, 2)).detach()
        return action, torch.zeros(batch, 2, dtype=torch.int64)


@one_process_or_workers
@pytest.mark.parametrize("layer", [normed, spectral, scripted])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_that_cannot_be_pickled_act_and_are_updated(
    kind: str, layer: Callable[[], nn.Module]
) -> None:
    module = Inner(layer()).eval()
    with KINDS[kind](acting(module)) as collector:
        for _ in range(2):
            expected = module(torch.ones(1))[0][0]
            actual = collector.next()["prey", "action"]
            torch.testing.assert_close(actual, expected.expand_as(actual))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(torch.tensor([[2.0], [-1.0]]))
            collector.update_policy_weights_()


def test_unchanged_weights_are_listed_without_another_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walk = WeightWalk(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    first = walk.tensors()
    monkeypatch.delattr("marl_collect.collectors.trainer_policy.weight_tensors")
    assert walk.tensors() is first


def test_a_module_that_overrides_named_parameters_is_always_walked_through() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs = TensorDict({"a": nn.Parameter(nn.Linear(1, 1).weight.detach())})
            self.params = TensorDictParams(inputs)

    module = Own()
    walk = WeightWalk(module)
    module.params["a"] = nn.Parameter(module.params["a"].detach() + 1)
    current, tensors = weight_tensors(module), walk.tensors()
    assert list(current) == list(tensors)
    assert all(current[name] is tensors[name] for name in current)
