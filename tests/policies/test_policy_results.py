"""Groups, states and policies with unusual names, sizes and errors; a changed flag."""

import warnings
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


class Remembers(nn.Module):
    """A lazy layer that reads a hidden state, whose shape the module declares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(4)
        self.state_shapes = {("prey", "h"): (3, 4)}

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        following = self.layer(torch.cat([x, state], -1)).tanh()
        return following[..., :2], torch.zeros(len(x), 2).long(), following


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_a_lazy_module_with_a_declared_state_acts(kind: Any) -> None:
    policy = TensorDictModule(
        Remembers(),
        in_keys=[("prey", "observation"), ("prey", "h")],
        out_keys=[("prey", "action"), ("hunter", "action"), ("next", "prey", "h")],
    )
    with kind([CountingEnv] * 2, policy, frames_per_batch=20) as collector:
        batch = collector.next()
    assert batch["prey", "h"].abs().sum() > 0
    assert batch["prey", "h"].shape[-1] == 4


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
