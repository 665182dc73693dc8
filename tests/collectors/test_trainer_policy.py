"""``WeightWalk`` walks through a module again only if its weights have changed.

``test_weight_changes.py`` has the changes.
"""

import pytest
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

from marl_collect.collectors.trainer_policy import WeightWalk
from marl_collect.weights.skeleton import weight_tensors


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
