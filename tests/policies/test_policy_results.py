"""Groups, states and policies with unusual names, sizes and errors; a changed flag."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.errors import PolicyError
from marl_collect.policies.assigned import AssignedPolicies


def write(td: TensorDictBase) -> TensorDictBase:
    observation = td["prey", "observation"]
    td["prey", "action"] = observation[..., :2] / 8
    td["hunter", "action"] = td["hunter", "observation"][..., 0].long() % 4
    return td


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


def all_a(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
    del seed
    return dict.fromkeys(agents, "a")


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


# Smaller ones


@pytest.mark.parametrize(
    "name", ["_policy_names", "_places", "names", "assign", "training"]
)
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
