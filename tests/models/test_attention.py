"""The network over a set of agents, against a dense computation of each agent alone."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_tools import observe
from torch import Tensor

pytest.importorskip("pettingzoo")

from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.core.description import EnvDescription
from marl_collect.models import (
    MultiAgentAttention,
    load_policy,
    make_policy,
    save_policy,
)

N, INPUTS, OUT = 4, 5, 3
DOUBLE = torch.float64


def network(share_params: bool = True, **options: Any) -> Any:
    defaults: dict[str, Any] = {"num_cells": [7, 6], "num_heads": 2, "absent": -1}
    defaults |= {"centralised": True, "share_params": share_params}
    return MultiAgentAttention(INPUTS, OUT, N, **(defaults | options)).double()


def inputs(*absent: int, rows: int = 3) -> Tensor:
    x = torch.randn(
        rows, N, INPUTS, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)
    )
    x[..., -1] = 0
    x[:, list(absent), -1] = 1
    return x


def dense(layers: Any, x: Tensor, agent: int, present: list[int], heads: int) -> Tensor:
    """Outputs of one agent of one row ``[N, F]``, with torch's attention."""
    encode, project, decode = layers
    seen = sorted({agent, *present})
    codes = encode(x[seen])
    queries, keys, contents = (
        part.unflatten(-1, (heads, -1)).transpose(0, 1)
        for part in project(codes).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(queries, keys, contents)
    own = seen.index(agent)
    out: Tensor = decode(torch.cat([codes[own], attended[:, own].flatten()]))
    return out


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("share_params", [True, False])
@pytest.mark.parametrize("absent", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_it_equals_a_dense_computation_without_the_absent_agents(
    absent: tuple[int, ...], share_params: bool, heads: int
) -> None:
    net, x = network(share_params, num_heads=heads), inputs(*absent)
    out = net(x)
    present = [i for i in range(N) if i not in absent]
    for agent in range(N):
        layers = net.get_stateful_net(None if share_params else agent)
        for row in range(len(x)):
            expected = dense(layers, x[row], agent, present, heads)
            torch.testing.assert_close(out[row, agent], expected)


# In policies and critics


OPTIONS: dict[str, Any] = {"network": "attention", "centralised": True}
HUNTERS = partial(CountingEnv, n_prey=0)


@pytest.fixture(scope="module")
def description() -> EnvDescription:
    return CountingEnv().description


@pytest.mark.parametrize("share_params", [True, False])
def test_collectors_act_with_it_as_the_module_does(share_params: bool) -> None:
    """Also with its recorded operations, which replace the module's calls."""
    policy = make_policy(
        HUNTERS().description, device="meta", share_params=share_params, **OPTIONS
    )
    with Collector(HUNTERS, policy, frames_per_batch=60, total_frames=120) as collector:
        for batch in collector:
            again = copy.deepcopy(collector.policy)(batch.clone())
            logits = ("hunter", "logits")
            torch.testing.assert_close(batch[logits], again[logits])


def test_it_is_saved_and_loaded(tmp_path: Path, description: EnvDescription) -> None:
    policy = make_policy(description, **OPTIONS)
    save_policy(tmp_path / "policy.pt", policy, description, **OPTIONS)
    loaded = load_policy(tmp_path / "policy.pt")
    td = observe(description, 3)
    out, expected = loaded(td.clone()), policy(td)
    for key in (("hunter", "logits"), ("prey", "loc"), ("prey", "scale")):
        assert torch.equal(out[key], expected[key])
