"""``WeightWalk`` lists a module's current weights after every kind of change."""

from typing import Any

import pytest
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

from marl_collect.collectors.trainer_policy import WeightWalk
from marl_collect.weights.skeleton import weight_tensors


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def replace_parameter(module: Any) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() + 1)


def replace_buffer(module: Any) -> None:
    module[1].running_mean = module[1].running_mean + 1


def replace_submodule(module: Any) -> None:
    module[2] = nn.Linear(3, 4)


def add_submodule(module: Any) -> None:
    module.append(nn.Linear(1, 1))


def add_deeper(module: Any) -> None:
    module[0].extra = nn.Linear(1, 1)


def remove_bias(module: Any) -> None:
    module[0].bias = None


def add_last_buffer(module: Any) -> None:
    module[2].register_buffer("extra", module[2].bias.detach() + 1)


def tie(module: Any) -> None:
    module[2].bias = module[2].weight


def test_unchanged_weights_are_listed_without_another_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walk = WeightWalk(build())
    first = walk.tensors()
    monkeypatch.delattr("marl_collect.collectors.trainer_policy.weight_tensors")
    assert walk.tensors() is first


def same(walk: Any, module: Any) -> Any:
    current, tensors = weight_tensors(module), walk.tensors()
    return list(current) == list(tensors) and all(
        current[n] is tensors[n] for n in current
    )


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter,
        replace_buffer,
        replace_submodule,
        add_submodule,
        add_deeper,
        remove_bias,
        add_last_buffer,
        tie,
    ],
)
def test_a_change_is_noticed(change: Any) -> None:
    module = build()
    walk = WeightWalk(module)
    before = list(walk.tensors().items())
    change(module)
    assert same(walk, module)
    after = list(walk.tensors().items())
    assert [(n, id(t)) for n, t in before] != [(n, id(t)) for n, t in after]


def test_a_module_that_overrides_named_parameters_is_always_walked_through() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs = TensorDict({"a": nn.Parameter(nn.Linear(1, 1).weight.detach())})
            self.params = TensorDictParams(inputs)

    module = Own()
    walk = WeightWalk(module)
    module.params["a"] = nn.Parameter(module.params["a"].detach() + 1)
    assert same(walk, module)
