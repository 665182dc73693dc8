"""``make_policy`` fits the description, for all kinds of observations and actions."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from model_tools import observe
from tensordict import TensorDict
from tensordict.nn import set_interaction_type
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import (
    ActionHead,
    HeadOptions,
    IndependentNormal,
    MultiAgentMLP,
    make_head,
    make_policy,
    save_policy,
)
from marl_collect.models.last_action import LastAction
from marl_collect.weights.materialize import materialize, meta_tensors

VECTOR = spaces.Box(-1, 1, (5,), np.float32)
GROUPS = {
    "masked": GroupDescription(
        ("a", "b"), VECTOR, spaces.Discrete(3), action_mask=True
    ),
    "one_hot": GroupDescription(
        ("a", "b"), VECTOR, spaces.Discrete(3), categorical_actions=False
    ),
    "multi": GroupDescription(("a",), VECTOR, spaces.MultiDiscrete([2, 3])),
    "binary": GroupDescription(("a",), VECTOR, spaces.MultiBinary(4)),
    "bounded": GroupDescription(
        ("a", "b", "c"),
        spaces.Dict(
            {
                "RGB": spaces.Box(0, 255, (40, 44, 3), np.uint8),
                "speed": spaces.Box(-1, 1, (2,), np.float64),
                "kind": spaces.Discrete(4),
                "map": spaces.Box(0, 1, (3, 3, 2), np.float32),
            }
        ),
        spaces.Box(np.array([-2, 0], np.float32), np.array([1, 5], np.float32)),
    ),
    "unbounded": GroupDescription(
        ("a", "b"),
        spaces.Tuple([spaces.MultiBinary(3), VECTOR]),
        spaces.Box(-np.inf, np.inf, (2,)),
    ),
    "widest": GroupDescription(
        ("a", "b"), VECTOR, spaces.Box(-np.finfo(np.float32).max, 3.4e38, (2,))
    ),
}


def describe(*names: Any) -> Any:
    return EnvDescription("test", {name: GROUPS[name] for name in names or GROUPS})


@pytest.mark.parametrize("centralised", [False, True])
@pytest.mark.parametrize("share_params", [False, True])
@pytest.mark.parametrize("device", [None, "meta"])
def test_one_policy_acts_for_every_group(
    centralised: bool, share_params: bool, device: str
) -> None:
    description = describe()
    setup = {"centralised": centralised, "share_params": share_params}
    policy: Any = make_policy(description, device=device, num_cells=(8,), **setup)
    nets = [m for m in policy.modules() if isinstance(m, MultiAgentMLP)]
    assert len(nets) == len(GROUPS)
    for net in nets:
        assert (net.centralised, net.share_params) == (centralised, share_params)
    if device:
        assert all(p.is_meta for p in policy.parameters())
        policy = materialize(policy, seed=0)
        assert not meta_tensors(policy)
    with set_interaction_type("random"):
        out = policy(observe(description, 4))
    for key, field in description.actions().items():
        action = out[key]
        assert action.shape == (4, *field.shape), key
        assert action.detach().numpy().dtype == field.dtype, key
        log_prob = out[(*key[:-1], "action_log_prob")]
        assert log_prob.shape == action.shape[:2]
        assert log_prob.isfinite().all()
        space = description.groups[key[0]].action
        rows = action.detach().flatten(0, 1).numpy()
        if key[0] == "one_hot":
            assert (rows.sum(-1) == 1).all()
        else:
            assert all(space.contains(row.astype(space.dtype)) for row in rows)


class FixedScaleHead(ActionHead):
    """Standard deviations are parameters, not outputs of the network."""

    noise_kind = "normal"

    def __init__(self, size: int, options: HeadOptions) -> None:
        super().__init__({"loc": "loc"}, options)
        self.n_outputs = self.noise_size = size
        self.distribution_class = IndependentNormal
        self.log_scale = torch.nn.Parameter(torch.full((size,), -50.0))

    def distribution(self, **parameters: torch.Tensor) -> IndependentNormal:
        loc = parameters["loc"]
        return IndependentNormal(loc, self.log_scale.exp().expand_as(loc))


def own_head(group: GroupDescription, options: HeadOptions) -> ActionHead:
    if isinstance(group.action, spaces.Box):
        return FixedScaleHead(group.action.shape[0], options)
    return make_head(group, options)


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_a_policy_can_have_a_head_of_its_own(recurrent: str | None) -> None:
    description = describe("unbounded", "multi")
    policy = make_policy(description, head=own_head, recurrent=recurrent)
    td = observe(description, 4)
    if recurrent:
        td["is_init"] = torch.ones(4, 1, dtype=torch.bool)
    with set_interaction_type("random"):
        policy(td)
    unbounded = td["unbounded"]
    torch.testing.assert_close(unbounded["action"], unbounded["loc"])
    assert unbounded["action_log_prob"].shape == (4, 2)
    assert td["multi", "action"].shape == (4, 1, 2)
    with pytest.raises(ValueError, match="set it in the head factory"):
        make_policy(description, head=own_head, check_mask=False)


@pytest.mark.parametrize("code", [{"head": own_head}, {"network": MultiAgentMLP}])
def test_policies_of_code_are_not_saved(code: dict[str, Any], tmp_path: Path) -> None:
    description = describe("unbounded")
    policy = make_policy(description, **code)
    with pytest.raises(ValueError, match="a file holds no code"):
        save_policy(tmp_path / "policy.pt", policy, description, **code)
    assert not list(tmp_path.iterdir())


def test_a_centralised_memory_without_layers_before_it_sees_every_agent() -> None:
    options: dict[str, Any] = {"num_cells": (), "num_layers": 2, "hidden_size": 6}
    policy = make_policy(
        describe("masked"), recurrent="gru", centralised=True, **options
    )
    frame = observe(describe("masked"), 1)
    before = policy(frame.clone())
    assert before["next", "masked", "recurrent_state"].shape == (1, 2, 2, 6)
    frame["masked", "observation"][:, 1] += 1
    after = policy(frame)
    one, other = (td["masked", "logits"][:, 0] for td in (before, after))
    assert not torch.equal(one, other)


def test_bad_inputs_name_the_group_and_the_key() -> None:
    policy = make_policy(describe("multi"))
    td = observe(describe("multi"), 2)
    with pytest.raises(KeyError, match="'multi' needs multi/observation, but found"):
        policy(td.exclude(("multi", "observation")))
    td["multi", "observation"] = torch.zeros(2, 1, 7)
    with pytest.raises(ValueError, match=r"'multi'.*observation: .* 5 .* found 7"):
        policy(td)
    td["multi"] = TensorDict({"observation": torch.zeros(2, 3, 5)}, [2, 3])
    with pytest.raises(ValueError, match=r"'multi'.*n_agents=1.*\[2, 3, 5\]"):
        policy(td)


def test_check_finite_finds_numbers_that_are_not_finite() -> None:
    td = observe(describe("multi"), 2)
    td["multi", "observation"][1, 0, 3] = float("nan")
    make_policy(describe("multi"))(td.clone())
    with pytest.raises(
        ValueError, match=r"'multi' .* 5 numbers in multi/logits.* \[1, 0, 0\]"
    ):
        make_policy(describe("multi"), check_finite=True)(td)


@pytest.mark.parametrize("n_prey", [0, 1, 3])
def test_a_policy_of_another_environment_names_the_cure(n_prey: int) -> None:
    policy = make_policy(CountingEnv(n_prey=2), num_cells=(4,))
    other = partial(CountingEnv, n_prey=n_prey)
    with pytest.raises((ValueError, KeyError), match="for this environment"):
        next(iter(Collector(other, policy, frames_per_batch=10)))


@pytest.mark.parametrize(
    ("space", "one_hot", "action", "expected"),
    [
        (spaces.Discrete(3), False, [2, 0], [[0, 0, 1], [1, 0, 0]]),
        (spaces.Discrete(2), True, [[0, 1], [1, 0]], [[0, 1], [1, 0]]),
        (
            spaces.MultiDiscrete([2, 3]),
            False,
            [[1, 0], [0, 2]],
            [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]],
        ),
        (spaces.MultiBinary(2), False, [[1, 0], [1, 1]], [[1, 0], [1, 1]]),
        (spaces.Box(-1, 1, (2,)), False, [[0.5, -1.0], [0, 1]], [[0.5, -1], [0, 1]]),
    ],
)
def test_the_last_actions_that_agents_observe_are_encoded(
    space: Any, one_hot: bool, action: Any, expected: Any
) -> None:
    group = GroupDescription(("a", "b"), VECTOR, space, categorical_actions=not one_hot)
    last = LastAction.of("agents", group)
    actual = last.encode(torch.tensor(action))
    assert actual.dtype == torch.float32
    assert actual.tolist() == expected
    assert last.size == len(expected[0])


def test_an_agent_that_does_not_act_keeps_its_last_action() -> None:
    """Without an entry of the frame before, it begins with zeros."""
    policy = make_policy(CountingEnv().description, last_action=True, num_cells=(4,))
    frame = observe(CountingEnv().description, 5)
    for group in ("hunter", "prey"):
        frame[group, "mask"][:, 1] = False
    first = policy(frame.clone())
    for group in ("hunter", "prey"):
        frame[group, "last_action"] = first["next", group, "last_action"] + 3
    second = policy(frame)
    for group, size in (("hunter", 4), ("prey", 2)):
        did = [td[group, "action"] for td in (first, second)]
        if group == "hunter":
            did = [torch.eye(size)[action] for action in did]
        expected = [action.clone() for action in did]
        expected[0][:, 1], expected[1][:, 1] = 0, 3
        assert not first[group, "last_action"].any()
        for td, last in zip((first, second), expected, strict=True):
            assert torch.equal(td["next", group, "last_action"], last)
