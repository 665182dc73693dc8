"""Collecting with policies of TorchRL's modules, and with ``make_policy``'s.

The environment is simple_spread with three agents. Networks have two hidden layers of
64 units; the recurrent ones have 64 units. Distributions of actions are the same, but
for exploration modules, which add their noise to a deterministic action. A recurrent
module of TorchRL acts once for all agents and ``make_policy``'s once per agent.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from harness.turns import Alternative
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from cases.case import Case, collecting
from marl_collect import Collector
from marl_collect.envs import PettingZooEnv
from marl_collect.models.policy import make_policy

AGENTS, INPUTS, ACTIONS, UNITS, FRAMES = 3, 18, 5, 64, 1_000
OBSERVATION, ACTION = ("agent", "observation"), ("agent", "action")
LOGITS = ("agent", "logits")
DISCRETE: dict[str, Any] = {}
CONTINUOUS: dict[str, Any] = {"continuous_actions": True}
ONE_HOT: dict[str, Any] = {"categorical_actions": False}


def multi_agent(keys: list[tuple[str, str]], n_outputs: int, *after: nn.Module) -> Any:
    """Return TorchRL's network for all agents."""
    from torchrl.modules import MultiAgentMLP

    network = MultiAgentMLP(
        INPUTS, n_outputs, AGENTS, centralised=False, share_params=True, depth=2,
        num_cells=UNITS,
    )  # fmt: skip
    module = nn.Sequential(network, *after)
    return TensorDictModule(module, [OBSERVATION], keys)


def sampling(name: str) -> Any:
    """Return an actor with a distribution."""
    from torchrl import modules

    network, keywords = multi_agent([LOGITS], ACTIONS), {}
    keys: Any = {"logits": LOGITS}
    if name == "TanhNormal":
        keys = [("agent", "loc"), ("agent", "scale")]
        network = multi_agent(keys, 2 * ACTIONS, NormalParamExtractor())
        keywords = {"low": torch.zeros(ACTIONS), "high": torch.ones(ACTIONS)}
    library = torch.distributions if name == "Categorical" else modules
    return modules.ProbabilisticActor(
        network,
        in_keys=keys,
        out_keys=[ACTION],
        distribution_class=getattr(library, name),
        distribution_kwargs=keywords,
        return_log_prob=True,
    )


def exploring(name: str) -> Any:
    """Return a deterministic actor followed by an exploration module."""
    from torchrl import modules
    from torchrl.data import Bounded, Composite

    box = Bounded(0, 1, (AGENTS, ACTIONS))
    spec = Composite(agent=Composite(action=box, shape=(AGENTS,)))
    noise = getattr(modules, name)(spec, action_key=ACTION)
    return TensorDictSequential(multi_agent([ACTION], ACTIONS, nn.Sigmoid()), noise)


def recurrent(name: str) -> Any:
    """Return an actor with one recurrent module for the whole environment."""
    from torchrl import modules

    flatten = TensorDictModule(nn.Flatten(-2), [OBSERVATION], ["sight"])
    head = nn.Sequential(
        nn.Linear(UNITS, AGENTS * ACTIONS), nn.Unflatten(-1, (AGENTS, ACTIONS))
    )
    sample = ProbabilisticTensorDictModule(
        in_keys={"logits": LOGITS},
        out_keys=[ACTION],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    cell = getattr(modules, name)(
        input_size=AGENTS * INPUTS, hidden_size=UNITS, in_key="sight", out_key="hidden"
    )
    head_module = TensorDictModule(head, ["hidden"], [LOGITS])
    return TensorDictSequential(flatten, cell, head_module, sample)


Row = tuple[dict[str, Any], dict[str, Any], Callable[[], Any]]
ROWS: dict[str, Row] = {
    "TanhNormal": (CONTINUOUS, {}, partial(sampling, "TanhNormal")),
    "Categorical": (DISCRETE, {}, partial(sampling, "Categorical")),
    "OneHotCategorical": (ONE_HOT, {}, partial(sampling, "OneHotCategorical")),
    **{
        name: (CONTINUOUS, {}, partial(exploring, name))
        for name in ("AdditiveGaussianModule", "OrnsteinUhlenbeckProcessModule")
    },
    **{
        f"{kind.upper()}Module": (
            DISCRETE,
            {"recurrent": kind, "hidden_size": UNITS},
            partial(recurrent, f"{kind.upper()}Module"),
        )
        for kind in ("gru", "lstm")
    },
}
"""Options of the environment, those of ``make_policy``, and TorchRL's policy."""


def collectors(stack: ExitStack, row: Row) -> dict[str, Alternative]:
    """Return collectors of both policies.

    Raises:
        RuntimeError: if a policy is not fused.
    """
    env_options, options, theirs = row
    factory = partial(PettingZooEnv, "simple_spread_v3", **env_options)
    cells = (UNITS, UNITS)
    ours = make_policy(factory, share_params=True, num_cells=cells, **options)
    alternatives = {}
    for name, acting in {"make_policy": ours, "TorchRL's modules": theirs()}.items():
        collector = stack.enter_context(
            Collector(factory, acting, frames_per_batch=FRAMES, seed=0)
        )
        collector.next()
        if "Fused" not in str(collector.explain()):
            raise RuntimeError(str(collector.explain()))
        alternatives[name] = collecting(collector)
    return alternatives


def cases() -> list[Case]:
    """Return a row per policy."""
    return [
        Case(name, partial(collectors, row=row), "frame") for name, row in ROWS.items()
    ]
