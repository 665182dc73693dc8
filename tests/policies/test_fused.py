"""A fused policy writes what the module writes, bit for bit where possible."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pure_modules import Called, Computes
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn
from torch.distributions import Categorical
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector
from marl_collect.core.description import EnvDescription, GroupDescription, allocate
from marl_collect.core.signature import IS_INIT
from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.models.policy import make_head, make_policy
from marl_collect.models.policy_options import PolicyOptions
from marl_collect.policies.fused.elementary import ElementaryOperations
from marl_collect.policies.fused.random_frames import RandomFrames
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import Generators, PolicyRunner

RANDOM, MODE = InteractionType.RANDOM, InteractionType.MODE
MEAN, DETERMINISTIC = InteractionType.MEAN, InteractionType.DETERMINISTIC
FRAMES = 6

RTOL, ATOL = 1e-4, 1e-4
"""Larger than for actions: close to an action's bounds, a difference in the last bit
changes the logarithm of its density by far more."""
ACTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "categorical": (spaces.Discrete(4), {}),
    "masked": (spaces.Discrete(4), {"action_mask": True}),
    "one_hot": (spaces.Discrete(4), {"categorical_actions": False}),
    "masked_one_hot": (
        spaces.Discrete(4),
        {"action_mask": True, "categorical_actions": False},
    ),
    "multi": (spaces.MultiDiscrete([3, 2]), {}),
    "normal": (spaces.Box(-np.inf, np.inf, (2,), np.float32), {}),
    "tanh_normal": (
        spaces.Box(
            np.array([-1.0, 0.0], np.float32),
            np.array([2.0, 5.0], np.float32),
            dtype=np.float32,
        ),
        {},
    ),
}
VECTOR: Any = spaces.Box(-np.inf, np.inf, (5,), np.float32)


def environment(
    action: str = "categorical", observation: Any = VECTOR, n_agents: int = 3
) -> EnvDescription:
    space, options = ACTIONS[action]
    agents = tuple(f"agent_{i}" for i in range(n_agents))
    group = GroupDescription(agents, observation, space, **options)
    return EnvDescription("test", {"agents": group})


class Acting:
    """One runner with its own memory and given observations."""

    def __init__(
        self, runner: PolicyRunner, description: EnvDescription, size: int
    ) -> None:
        row = allocate(description.row(), (size,))
        RandomFrames(description, row).draw()
        runner.probe(row)
        self.memory = row | allocate(runner.signature.memory(description), (size,))
        if runner.signature.reads_is_init:
            self.memory[IS_INIT] = np.ones((size, 1), np.bool_)
        self.runner, self.what, self.size = runner, description, size
        runner.bind(self.memory)

    def slot(
        self, interaction_type: InteractionType, frames: int, seed: int
    ) -> list[Any]:
        """Return the outputs of each frame; heads draw from generators of ``seed``."""
        observations = RandomFrames(self.what, self.memory)
        generators = Generators(seed, range(self.size))
        signature = self.runner.signature
        keys = [*signature.outputs, *signature.carried]
        rows = []
        with torch.no_grad(), set_interaction_type(interaction_type):
            self.runner.begin(frames, generators)
            for frame in range(frames):
                observations.draw()
                self.runner.act(frame)
                rows.append({key: self.memory[key].copy() for key in keys})
        return rows


def pair(
    policy: Any, description: Any, size: int = 2, interaction_type: Any = RANDOM
) -> tuple[Acting, Acting]:
    """Return the policy fused, and the policy called."""
    fused = FusedRunner(ModuleRunner(policy, description, size, how=interaction_type))
    return (
        Acting(fused, description, size),
        Acting(ModuleRunner(policy, description, size), description, size),
    )


def check_equal(
    acting: Any, interaction_type: Any = RANDOM, *, seed: int = 0, fused: bool = True
) -> list[Any]:
    """Compare all outputs of some frames; return those of the fused runner."""
    slots = []
    for runner in acting:
        torch.manual_seed(seed)
        slots.append(runner.slot(interaction_type, FRAMES, seed))
    for ours, theirs in zip(*slots, strict=True):
        assert ours.keys() == theirs.keys()
        for key, array in theirs.items():
            assert ours[key].dtype == array.dtype
            np.testing.assert_allclose(
                ours[key], array, RTOL, ATOL, err_msg=str((key, interaction_type))
            )
    explanation = acting[0].runner.explain()
    assert explanation.startswith("Fused" if fused else "Not fused"), explanation
    ours_first: list[Any] = slots[0]
    return ours_first


@pytest.mark.parametrize("interaction_type", [RANDOM, MODE, DETERMINISTIC])
@pytest.mark.parametrize("action", ACTIONS)
def test_heads_write_the_same(action: str, interaction_type: InteractionType) -> None:
    description = environment(action)
    rows = check_equal(
        pair(make_policy(description), description, interaction_type=interaction_type),
        interaction_type,
    )
    assert set(rows[0]) >= {("agents", "action"), ("agents", "action_log_prob")}


def linear(n_inputs: int, n_outputs: int, n_agents: int, **options: Any) -> nn.Module:
    del n_agents, options
    return nn.Linear(n_inputs, n_outputs)


CHANGES: dict[str, dict[str, Any]] = {
    "centralised": {"centralised": True},
    "share_params": {"share_params": False},
    "agent_ids": {"agent_ids": True},
    "last_action": {"last_action": True},
    "network": {"network": linear},
    "head": {"head": make_head},
    "num_cells": {"num_cells": (8, 8, 8)},
    "activation_class": {"activation_class": nn.ReLU},
    "recurrent": {"recurrent": "lstm"},
    "hidden_size": {"recurrent": "gru", "hidden_size": 16},
    "num_layers": {"recurrent": "gru", "num_layers": 2},
    "conv": {"conv": {"num_cells": [4]}},
    "device": {"device": "cpu"},
    "epsilon": {"epsilon": 0.3},
    "return_log_prob": {"return_log_prob": False},
    "check_mask": {"check_mask": False},
    "check_finite": {"check_finite": True},
    "default_interaction_type": {"default_interaction_type": MODE},
}


@pytest.mark.parametrize("action", ["categorical", "masked", "masked_one_hot"])
@pytest.mark.parametrize("option", CHANGES)
def test_a_policy_with_any_option_is_fused(option: str, action: str) -> None:
    image: Any = spaces.Box(-1, 1, (12, 12, 2), np.float32)
    description = environment(action, image if option == "conv" else VECTOR)
    check_equal(pair(make_policy(description, **CHANGES[option]), description))


def test_every_option_of_make_policy_has_a_change() -> None:
    assert CHANGES.keys() == {field.name for field in fields(PolicyOptions)}


def test_an_index_out_of_range_is_an_error_when_it_is_encoded() -> None:
    index = torch.tensor([0, 2])
    with ElementaryOperations():
        encoded = nn.functional.one_hot(index, 3)
        assert torch.equal(nn.functional.one_hot(index), encoded)
        for wrong in (3, -1):
            with pytest.raises(RuntimeError, match="out of bounds"):
                nn.functional.one_hot(torch.tensor([0, wrong]), num_classes=3)
    assert torch.equal(nn.functional.one_hot(index, 3), encoded)


def test_interaction_types_may_change_between_slots() -> None:
    description = environment("normal")
    acting = pair(make_policy(description), description)
    for interaction_type in (RANDOM, MODE, RANDOM, DETERMINISTIC):
        rows = check_equal(acting, interaction_type)
        differs = rows[0]["agents", "action"] != rows[0]["agents", "loc"]
        assert differs.any() == (interaction_type is RANDOM)


@pytest.mark.parametrize("action", ["normal", "tanh_normal"])
def test_mean_actions_are_those_of_the_module(action: str) -> None:
    description = environment(action)
    acting = pair(make_policy(description), description, interaction_type=MEAN)
    # If the mean has no closed form, it is estimated with torch's generator.
    check_equal(acting, MEAN)


def test_errors_of_the_module_are_raised() -> None:
    description = environment()
    acting = pair(make_policy(description), description)
    for runner in acting:
        with pytest.raises(NotImplementedError, match="have no mean"):
            runner.slot(MEAN, 2, 0)


@pytest.mark.parametrize("share_params", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_go_through_convolutions(dtype: torch.dtype, share_params: bool) -> None:
    image: Any = spaces.Box(0, 255, (30, 30, 3), np.uint8)
    description = environment("categorical", image)
    conv = {"num_cells": [4, 4], "kernel_sizes": [5, 3], "dtype": dtype}
    policy = make_policy(description, conv=conv, share_params=share_params)
    check_equal(pair(policy, description))


def layers() -> dict[str, Callable[[], nn.Module]]:
    makers: dict[str, Callable[[], nn.Module]] = {
        name: getattr(nn, name)
        for name in (
            "ReLU", "Tanh", "ELU", "GELU", "SiLU", "LeakyReLU", "Sigmoid", "Softplus",
            "Hardtanh", "Hardswish", "Mish", "SELU", "Identity", "ReLU6", "Softsign",
        )
    }  # fmt: skip
    makers["LayerNorm"] = lambda: nn.LayerNorm(8)
    makers["BatchNorm1d"] = lambda: nn.BatchNorm1d(3).eval()
    makers["Dropout"] = lambda: nn.Dropout(0.5).eval()
    makers["PReLU"] = nn.PReLU
    makers["NoBias"] = lambda: nn.Linear(8, 8, bias=False)
    return makers


@pytest.mark.parametrize("layer", layers())
def test_layers_of_torch_are_repeated(layer: str) -> None:
    net = nn.Sequential(nn.Linear(5, 8), layers()[layer](), nn.Linear(8, 4))
    check_equal(pair(categorical(net), environment()))


def categorical(net: nn.Module, **options: Any) -> TensorDictSequential:
    """A policy built from modules of torch and tensordict."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, [("agents", "observation")], [("agents", "logits")]),
        ProbabilisticTensorDictModule(
            [("agents", "logits")],
            [("agents", "action")],
            distribution_class=Categorical,
            return_log_prob=True,
            log_prob_key=("agents", "action_log_prob"),
            **options,
        ),
    )


def test_a_mask_without_legal_actions_raises_the_module_s_error() -> None:
    description = environment("masked")
    acting = pair(make_policy(description), description)[0]
    check_equal((acting, pair(make_policy(description), description)[0])[:1] * 2)
    with torch.no_grad(), set_interaction_type(RANDOM):
        acting.runner.begin(2, Generators(0, range(2)))
        acting.memory["agents", "action_mask"][...] = True
        acting.runner.act(0)
        acting.memory["agents", "action_mask"][1, 2] = False
        with pytest.raises(ValueError, match="'agent_2'"):
            acting.runner.act(1)


def counting() -> nn.Module:
    def call(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.calls += 1
        return x[..., :4] + net.calls

    net: Any = Called(call)
    net.calls = 0
    return net


class CountingMLP(MultiAgentMLP):
    """Overrides the forward of a pure module."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs)


def hooked() -> nn.Module:
    net = nn.Linear(5, 4)
    net.register_forward_pre_hook(lambda *_: None)
    return net


def drawing() -> nn.Module:
    net = Computes(lambda _, x: x[..., :4])
    net.rng = np.random.default_rng(0)  # type: ignore[assignment]
    return net


UNFIT: list[tuple[Callable[[], nn.Module], str]] = [
    (counting, "module.0.module (Called) is not declared as pure"),
    (
        lambda: CountingMLP(5, 4, 3, centralised=False, share_params=True),
        "module.0.module (CountingMLP) is not declared",
    ),
    (hooked, "module.0.module (Linear) has hooks"),
    (
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(5, 4)),
        "changes an input or a buffer in place",
    ),
    (lambda: Computes(lambda _, x: x[..., :4] * x.max().item()), "reads values"),
    (
        lambda: Computes(
            lambda _, x: (x[..., :4] + 1).transpose_(0, 1).transpose(0, 1)
        ),
        "changes the shape of a tensor in place",
    ),
    (
        lambda: Computes(lambda _, x: torch.zeros(2, 3, 4) + x[x > 0].sum()),
        "depends on data",
    ),
    (drawing, "changes of module.0.module.rng ("),
    (
        lambda: Computes(lambda _, x: (torch.rand(3), x[..., :4])[1]),
        "draws random numbers that it does not use (rand)",
    ),
]


@pytest.mark.parametrize(("make", "reason"), UNFIT)
def test_unfit_parts_are_named(make: Callable[[], nn.Module], reason: str) -> None:
    net = make()
    acting = pair(categorical(net), environment())[0]
    acting.slot(RANDOM, 3, 0)
    assert reason in acting.runner.explain()
    assert "called once per frame" in acting.runner.explain()
    if make is counting:
        assert net.calls == 3  # Calls before the frames were of a copy.


def test_policies_that_return_another_tensordict_are_fused_too() -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        action = td["agents", "observation"][..., :4].argmax(-1)
        group = TensorDict({"action": action}, [*td.batch_size, 3])
        return TensorDict({"agents": group}, td.batch_size)

    check_equal(pair(act, environment()), fused=False)
    act.pure_forward = True  # type: ignore[attr-defined]
    check_equal(pair(act, environment()))


class Restarts(TensorDictModuleBase):
    """Asks in Python whether an environment begins an episode, after it drew noise."""

    pure_forward = True
    in_keys = [("agents", "observation"), "is_init"]
    out_keys = [("agents", "action"), ("agents", "noise")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation = tensordict["agents", "observation"][..., :4]
        noise = torch.rand(observation.shape)
        values = observation + noise
        if tensordict["is_init"].any():
            values = torch.where(tensordict["is_init"].unsqueeze(-1), -values, values)
            noise = noise * torch.rand(observation.shape)
        tensordict["agents", "noise"] = noise
        tensordict["agents", "action"] = values.argmax(-1)
        return tensordict


@pytest.mark.parametrize("size", [1, 3, 20])
def test_a_policy_that_asks_for_begun_episodes_is_recorded_both_ways(size: int) -> None:
    acting = pair(Restarts(), environment(), size)
    runners = [acting[0].runner, acting[1].runner]
    for begins in (False, True, False, False, True):
        outputs = []
        for stepper, runner in zip(acting, runners, strict=True):
            stepper.memory[IS_INIT][...] = False
            stepper.memory[IS_INIT][-1] = begins
            torch.manual_seed(0)
            with torch.no_grad(), set_interaction_type(RANDOM):
                runner.begin(1, Generators(0, range(size)))
                runner.act(0)
            outputs.append([stepper.memory[k].copy() for k in runner.signature.outputs])
        for ours, theirs in zip(*outputs, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert runners[0].explain().startswith("Fused")
    check_equal(acting, seed=3)


def test_a_policy_is_called_under_autocast() -> None:
    description = environment("normal")
    acting = pair(make_policy(description), description)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        acting[0].slot(RANDOM, 1, 0)
    assert "autocast is on" in acting[0].runner.explain()
    check_equal(acting)


class Bytes(nn.Module):
    """Multiplies by the number of bytes of the default dtype."""

    pure_forward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.finfo(torch.get_default_dtype()).bits // 8)


def test_a_policy_is_recorded_for_each_default_dtype() -> None:
    acting = pair(categorical(nn.Sequential(nn.Linear(5, 4), Bytes())), environment())
    try:
        for dtype in 3 * (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            check_equal(acting)
    finally:
        torch.set_default_dtype(torch.float32)


def test_recording_changes_neither_memory_nor_torch_generator() -> None:
    description = environment("masked")
    policy = make_policy(description)
    runner = FusedRunner(ModuleRunner(policy, description, 1))
    acting = Acting(runner, description, 1)
    for array in acting.memory.values():
        array[...] = 1
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.no_grad(), set_interaction_type(MODE):
        runner.begin(1, Generators(0, range(1)))
    assert runner.explain().startswith("Fused")
    assert torch.equal(torch.get_rng_state(), before)
    assert all((array == 1).all() for array in acting.memory.values())


def test_trainer_may_call_the_policy_between_frames() -> None:
    description = environment("categorical")
    policy = make_policy(description)
    for acting in pair(policy, description):
        acting.slot(RANDOM, 2, 0)
        batch = TensorDict({"agents": {"observation": torch.zeros(7, 3, 5)}}, [7])
        with set_interaction_type(RANDOM):
            assert policy(batch)["agents", "action"].shape == (7, 3)


def test_a_branch_on_a_drawn_number_is_as_likely_as_in_the_module() -> None:
    """Sampling again after a failed guard would favour the recorded branch."""

    def flips(_: Any, observation: torch.Tensor) -> torch.Tensor:
        action = torch.zeros(observation.shape[:2], dtype=torch.int64)
        return action + 1 if bool(torch.rand(()) < 0.3) else action + 0

    keys = ("hunter", "observation"), ("hunter", "action")
    policy = TensorDictModule(Computes(flips), in_keys=[keys[0]], out_keys=[keys[1]])
    with Collector(
        lambda: CountingEnv(n_prey=0), policy, frames_per_batch=200, seed=0
    ) as collector:
        torch.manual_seed(1)
        actions = collector.next()["hunter", "action"][0, :, 0].tolist()
        assert collector.explain()[0].startswith("Fused")
    torch.manual_seed(1)
    assert actions == [int(torch.rand(()) < 0.3) for _ in range(200)]


def test_outputs_that_are_not_finite_prove_nothing() -> None:
    net = Computes(
        lambda _, x: (0 * x[..., :2], torch.zeros(len(x), 2).long(), x * float("nan"))
    )
    keys = [("prey", "action"), ("hunter", "action"), ("prey", "bad")]
    policy = TensorDictModule(net, [("prey", "observation")], keys)
    with Collector(CountingEnv, policy, frames_per_batch=4) as collector:
        collector.next()
        assert "is not finite for random observations" in collector.explain()[0]
