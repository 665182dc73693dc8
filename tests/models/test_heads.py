"""Heads: keys, interaction types, action masks and given noise."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type

from marl_collect.models import (
    CategoricalHead,
    HeadOptions,
    MultiCategoricalHead,
    NormalHead,
    TanhNormalHead,
)
from marl_collect.weights.materialize import materialize

OPTIONS = HeadOptions(group="walker", agents=("walker_0", "walker_1"))
LOW, HIGH = [-2.0, 0.0, 1.0], [1.0, 5.0, 1.5]
HEADS = {
    "categorical": lambda: CategoricalHead(4, OPTIONS, mask=True),
    "one_hot": lambda: CategoricalHead(4, OPTIONS, mask=True, one_hot=True),
    "multi": lambda: MultiCategoricalHead([2, 5], OPTIONS),
    "normal": lambda: NormalHead(3, OPTIONS),
    "tanh": lambda: TanhNormalHead(LOW, HIGH, OPTIONS),
}
SHAPES = {
    "categorical": (),
    "one_hot": (4,),
    "multi": (2,),
    "normal": (3,),
    "tanh": (3,),
}


def parameters(head: Any, batch: int = 6) -> Any:
    group = TensorDict({}, [batch, 2])
    for key in (key[-1] for key in head.in_keys):
        if key == "action_mask":
            group[key] = torch.rand(batch, 2, 4) > 0.5
            group[key][..., 1] = True
        elif key == "scale":
            group[key] = torch.rand(batch, 2, head.noise_size) + 0.1
        else:
            group[key] = torch.randn(batch, 2, head.noise_size)
    return TensorDict({"walker": group}, [batch])


@pytest.fixture(params=HEADS)
def name(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param


def test_actions_and_log_probabilities_of_each_agent(name: str) -> None:
    head = HEADS[name]()
    out = head(parameters(head))
    action = out["walker", "action"]
    assert action.shape == (6, 2, *SHAPES[name])
    assert action.dtype == (
        torch.float32 if name in ("normal", "tanh") else torch.int64
    )
    assert out["walker", "action_log_prob"].shape == (6, 2)
    torch.testing.assert_close(
        out["walker", "action_log_prob"], head.get_dist(out).log_prob(action)
    )
    assert head.out_keys == [("walker", "action"), ("walker", "action_log_prob")]


def test_interaction_types_select_the_action(name: str) -> None:
    head = HEADS[name]()
    td = parameters(head)
    dist = head.get_dist(td)

    def chosen(kind: Any) -> Any:
        with set_interaction_type(kind):
            return head(td.clone())["walker", "action"]

    assert torch.equal(chosen(InteractionType.MODE), dist.mode)
    assert torch.equal(chosen(InteractionType.DETERMINISTIC), dist.deterministic_sample)
    assert torch.equal(head(td.clone())["walker", "action"], chosen("deterministic"))
    samples = torch.stack([chosen(InteractionType.RANDOM) for _ in range(20)])
    assert not torch.equal(samples[0], samples[1])
    if name in ("normal", "tanh"):
        assert chosen(InteractionType.MEAN).isfinite().all()
    else:
        with pytest.raises(NotImplementedError, match="'walker' has discrete"):
            chosen(InteractionType.MEAN)
    torch.manual_seed(1)
    once = chosen(InteractionType.RANDOM)
    torch.manual_seed(1)
    assert torch.equal(chosen(InteractionType.RANDOM), once)


def test_given_noise_determines_the_action(name: str) -> None:
    head = HEADS[name]()
    td = parameters(head)
    noise = torch.randn(6, 2, head.noise_size)
    direct = head.sample_from_noise(td.clone(), noise)
    head.noise = noise
    with set_interaction_type(InteractionType.RANDOM):
        called = head(td.clone())
    for key in head.out_keys:
        assert torch.equal(direct[key], called[key])
    rows = [head.sample_from_noise(td[i : i + 1], noise[i : i + 1]) for i in range(6)]
    for key in head.out_keys:
        # Vectorised functions may differ in the last bit for different numbers of rows.
        torch.testing.assert_close(torch.cat([row[key] for row in rows]), direct[key])
    assert torch.equal(
        head(td.clone())["walker", "action"], head.get_dist(td).deterministic_sample
    )


def test_heads_can_be_copied_pickled_and_materialized(name: str) -> None:
    with torch.device("meta"):
        on_meta = HEADS[name]()
    original = HEADS[name]()
    td = parameters(original)
    copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    for head in [*copies, materialize(on_meta), materialize(copies[1])]:
        out = head(td.clone())
        assert torch.equal(out["walker", "action"], original(td)["walker", "action"])
    assert original.state_dict() == {}
    assert "walker" in repr(original)


def test_a_missing_parameter_names_group_and_key(name: str) -> None:
    head = HEADS[name]()
    key = head.in_keys[0]
    with pytest.raises(KeyError, match=rf"walker.* needs walker/{key[-1]}, but found"):
        head(parameters(head).exclude(key))


def test_a_mask_without_legal_actions_is_an_error_that_names_group_and_agent() -> None:
    head = CategoricalHead(4, OPTIONS, mask=True)
    td = parameters(head)
    td["walker", "action_mask"][3, 1] = False
    with pytest.raises(ValueError, match=r"'walker_1' of group 'walker'.*\[3\]"):
        head(td)
    unchecked = CategoricalHead(4, OPTIONS, mask=True, check_mask=False)
    assert unchecked(td)["walker", "action"].shape == (6, 2)


@pytest.mark.parametrize("bound", [float("inf"), float("nan"), -3.0])
def test_bounds_must_be_finite_and_in_order(bound: Any) -> None:
    with pytest.raises(ValueError, match=r"'walker' needs finite bounds"):
        TanhNormalHead([-1.0], [bound], OPTIONS)
