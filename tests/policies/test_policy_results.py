"""Everything that a policy may return works, alone and as one of several."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.collectors.initialization import prepare
from marl_collect.core.env import MultiAgentEnv
from marl_collect.errors import PolicyError
from marl_collect.models import RecurrentModule
from marl_collect.policies.assigned import AssignedPolicies


def write(td: TensorDictBase) -> TensorDictBase:
    observation = td["prey", "observation"]
    td["prey", "action"] = observation[..., :2] / 8
    td["hunter", "action"] = td["hunter", "observation"][..., 0].long() % 4
    return td


def clone(td: TensorDictBase) -> TensorDictBase:
    return write(td.clone())


def shallow(td: TensorDictBase) -> TensorDictBase:
    return write(td.clone(False))


def detached(td: TensorDictBase) -> TensorDictBase:
    return write(td.detach().clone())


def applied(td: TensorDictBase) -> Any:
    copied: Any = td.apply(torch.clone)
    return write(copied)


def moved(td: TensorDictBase) -> TensorDictBase:
    return write(td.to_tensordict())


def nothing(td: TensorDictBase) -> None:
    write(td)


def selection(td: TensorDictBase) -> TensorDictBase:
    return write(td).select(("prey", "action"), ("hunter", "action"))


def exclusion(td: TensorDictBase) -> TensorDictBase:
    return write(td).exclude(("prey", "observation"))


def new(td: TensorDictBase) -> TensorDictBase:
    result = write(td.clone())
    out = TensorDict({}, td.batch_size)
    for group in ("prey", "hunter"):
        out[group, "action"] = result[group, "action"]
    return out


class Module(nn.Module):
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return write(tensordict.clone())


STYLES: dict[str, Any] = {
    "its input": write,
    "a clone": clone,
    "a shallow clone": shallow,
    "a detached clone": detached,
    "apply": applied,
    "another copy": moved,
    "nothing": nothing,
    "a selection": selection,
    "an exclusion": exclusion,
    "a new TensorDict": new,
    "a module's clone": Module(),
}
ACTIONS = [("prey", "action"), ("hunter", "action")]


def pure(policy: Any) -> Any:
    def act(td: TensorDictBase) -> Any:
        return policy(td)

    act.pure_forward = True  # type: ignore[attr-defined]
    return act


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_policy_may_return(style: str, fused: bool) -> None:
    policy = pure(STYLES[style]) if fused else STYLES[style]
    env = partial(CountingEnv, deaths=True)
    batches = []
    for acting in (write, policy):
        with Collector([env] * 2, acting, frames_per_batch=80, seed=0) as collector:
            batches.append(collector.next().clone())
            fuses = collector.explain()[0].startswith("Fused")
    assert fuses == fused
    ours, other = batches
    for key in set(ours.keys(True, True)) - {("prey", "observation")}:
        assert torch.equal(ours[key], other[key]), key
    if style != "an exclusion":
        key = ("prey", "observation")
        assert torch.equal(ours[key], other[key])
    actions = other["prey", "action"]
    assert actions.unique().numel() > 3


class Breaks:
    """Returns a clone with a changed entry after some calls."""

    def __init__(self, key: Any) -> None:
        self.key, self.calls = key, 0

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        td = write(td.clone())
        if self.calls > 4:
            td[self.key] = ~td[self.key]
        return td


def test_a_clone_with_another_flag_is_refused() -> None:
    with (
        Collector(CountingEnv, Breaks("done"), frames_per_batch=40) as collector,
        pytest.raises(PolicyError, match="changed its input done"),
    ):
        collector.next()


# Names of groups and entries


class Underscored(MultiAgentEnv):
    """The counting environment, with a group and an entry that begin with ``_``."""

    def __init__(self) -> None:
        from dataclasses import replace

        super().__init__()
        self._env = CountingEnv()
        described = self._env.description
        groups = {"_prey": described.groups["prey"]}
        groups["hunter"] = described.groups["hunter"]
        self._described = replace(described, groups=groups)

    @property
    def description(self) -> Any:
        return self._described

    def bind(self, row: Any) -> None:
        self._env.bind(
            {("prey", *k[1:]) if k[0] == "_prey" else k: a for k, a in row.items()}
        )

    def reset_row(self, seed: Any) -> None:
        self._env.reset_row(seed)

    def step_row(self) -> None:
        self._env.step_row()

    def render(self) -> None:
        return None

    def close(self) -> None:
        self._env.close()


def act_underscored(td: TensorDictBase) -> TensorDictBase:
    td["_prey", "action"] = td["_prey", "observation"][..., :2] / 8
    td["hunter", "action"] = td["hunter", "observation"][..., 0].long() % 4
    td["_prey", "_hidden"] = td["_prey", "observation"]
    td["_prey", "shown"] = td["_prey", "observation"] * 2
    td["next", "_prey", "state"] = td.get(("_prey", "state"), torch.zeros(1, 3, 1)) + 1
    return td


@pytest.mark.parametrize("several", [False, True])
def test_a_group_whose_name_begins_with_an_underscore_keeps_its_actions(
    several: bool,
) -> None:
    options: dict[str, Any] = {"policy": act_underscored}
    if several:
        options = {"policies": {"a": act_underscored}, "assign": all_a}
    with Collector(Underscored, frames_per_batch=10, **options) as collector:
        batch = collector.next()
    observation = batch["_prey", "observation"]
    assert torch.equal(batch["_prey", "action"], observation[..., :2] / 8)
    assert torch.equal(batch["_prey", "shown"], observation * 2)
    assert ("_prey", "_hidden") not in batch.keys(True, True)
    assert (batch["next", "_prey", "state"] > 0).all()


def all_a(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
    del seed
    return dict.fromkeys(agents, "a")


def test_random_actions_of_such_a_group_are_kept() -> None:
    with Collector(Underscored, frames_per_batch=10) as collector:
        assert ("_prey", "action") in collector.next().keys(True, True)


# Lazy parameters


class Remembers(nn.Module):
    """Reads a hidden state and whether an episode begins; its size is not known."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = layer()
        self.state_shapes = {("prey", "h"): (3, 4)}

    def forward(self, x: Any, state: Any, is_init: Any) -> Any:
        state = torch.where(is_init.reshape(-1, 1, 1), torch.zeros_like(state), state)
        following = self.layer(torch.cat([x, state], -1)).tanh()
        hunters = torch.zeros(x.shape[0], 2, dtype=torch.int64)
        return following[..., :2], hunters, following


def remembering(layer: Callable[[], nn.Module]) -> TensorDictModule:
    return TensorDictModule(
        Remembers(layer),
        in_keys=[("prey", "observation"), ("prey", "h"), "is_init"],
        out_keys=[("prey", "action"), ("hunter", "action"), ("next", "prey", "h")],
    )


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_lazy_module_with_a_declared_state_acts(kind: Any) -> None:
    size = CountingEnv().description.groups["prey"].observation.shape[0]
    for layer in (lambda: nn.LazyLinear(4), lambda: nn.Linear(size + 4, 4)):
        with kind(
            [CountingEnv] * 2, remembering(layer), frames_per_batch=20
        ) as collector:
            batch = collector.next()
        assert batch["prey", "h"].abs().sum() > 0
        assert batch["prey", "h"].shape[-1] == 4


def test_lazy_recurrent_modules_of_ours_still_act() -> None:
    assert RecurrentModule is not None
    description = CountingEnv().description
    prepared = prepare(remembering(lambda: nn.LazyLinear(4)), description, 0)
    assert not any(
        isinstance(p, nn.UninitializedParameter) for p in prepared.parameters()
    )


# Smaller ones


@pytest.mark.parametrize("name", ["_given", "_places", "names", "assign", "training"])
def test_names_of_attributes_are_no_names_of_policies(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be named"):
        AssignedPolicies({name: None}, all_a)


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
    assert any(
        note.startswith("Raised by assign(seed=") for note in excinfo.value.__notes__
    )


def test_a_scheme_that_is_none_is_refused_without_a_policy() -> None:
    for policy in (None, write):
        with pytest.raises(TypeError, match=r"must be SharedMemoryWeights\(\)"):
            MultiSyncCollector(
                CountingEnv,
                policy,
                frames_per_batch=8,
                weight_sync_schemes={"policy": 3},  # type: ignore[dict-item]
            )


def test_random_actions_in_the_widest_box_are_finite() -> None:
    from marl_collect.core.random_actions import Sampler

    largest = float(np.finfo(np.float64).max)
    box: Any = spaces.Box(-largest, largest, (2,), np.float64)
    noise = np.random.default_rng(0).random((100, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actions = Sampler(("g", "action"), box, 1, False, None).actions(noise)
    assert np.isfinite(actions).all()
    assert (actions < 0).any()
    assert (actions > 0).any()
