"""Multi-agent networks: ours, TorchRL's, and a loop of torch modules.

All have the same weights and two hidden layers of 64 units. "policy" is a forward pass,
a sample and its log-probability for 4 continuous actions, called as a TensorDict
module. "fused" is our policy as a collector's worker runs it with that many
environments; the other two are called as for "policy".
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from harness.turns import Alternative
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    set_interaction_type,
)
from torch import Tensor, nn
from torchrl import modules as torchrl

from cases.case import Case
from cases.policy_step import bound
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import (
    GroupModule,
    HeadOptions,
    LocScale,
    MultiAgentMLP,
    TanhNormalHead,
)
from marl_collect.policies.runner import Generators

INPUTS, ACTIONS, CELLS = 31, 4, (64, 64)
TASKS = ("forward", "policy", "fused", "training")
FRAMES = 200  # Frames of a slot; a fused policy samples the noise of a slot at once.
MOST_ENVS = 256  # Maximum batch of a fused policy: environments of one worker.
N_AGENTS = (3, 8, 16)
BATCHES = (1, 32, 256, 1024, 4096)
Call = Callable[[], object]


@dataclass(frozen=True)
class Setup:
    """One row of the table."""

    task: str
    centralised: bool
    share_params: bool
    n_agents: int
    batch: int

    @property
    def title(self) -> str:
        """The name of the row."""
        sees = "centralised" if self.centralised else "local"
        parameters = "shared" if self.share_params else "separate"
        return (
            f"{self.task}, {sees}, {parameters} parameters, {self.n_agents} agents, "
            f"batch {self.batch}"
        )


class LoopOfModules(nn.Module):
    """The hand-written alternative: a loop over agents with torch networks."""

    def __init__(self, network: MultiAgentMLP) -> None:
        super().__init__()
        count = 1 if network.share_params else network.n_agents
        agents = [None] if network.share_params else list(range(count))
        self.networks = nn.ModuleList(network.get_stateful_net(a) for a in agents)
        self.n_agents = network.n_agents
        self.centralised = network.centralised

    def forward(self, x: Tensor) -> Tensor:
        """Apply each network to its agent's input."""
        outputs = []
        for agent in range(self.n_agents):
            network = self.networks[agent % len(self.networks)]
            outputs.append(network(x.flatten(-2) if self.centralised else x[:, agent]))
        return torch.stack(outputs, 1)


def networks(setup: Setup, n_outputs: int) -> dict[str, nn.Module]:
    """Build the three networks with the same weights."""
    options: dict[str, Any] = {
        "share_params": setup.share_params,
        "num_cells": list(CELLS),
    }
    theirs = torchrl.MultiAgentMLP(
        INPUTS, n_outputs, setup.n_agents, centralized=setup.centralised, **options
    )
    ours = MultiAgentMLP(
        INPUTS, n_outputs, setup.n_agents, centralised=setup.centralised, **options
    )
    ours.load_torchrl_state_dict(theirs.state_dict())
    return {"ours": ours, "TorchRL": theirs, "modules": LoopOfModules(ours)}


def policies(setup: Setup) -> dict[str, nn.Module]:
    """Build policies that sample actions: ours with our head, others with TorchRL's."""
    nets = networks(setup, 2 * ACTIONS)
    low, high = [-1.0] * ACTIONS, [1.0] * ACTIONS
    keys = [("agents", "loc"), ("agents", "scale")]
    observed = [("agents", "observation")]
    ours = nn.Sequential(
        GroupModule(
            nn.Sequential(nets["ours"], LocScale()), observed, keys, group="agents"
        ),
        TanhNormalHead(low, high, HeadOptions("agents")),
    )
    modules: dict[str, nn.Module] = {"ours": ours}
    for name in ("TorchRL", "modules"):
        network = nn.Sequential(nets[name], NormalParamExtractor())
        modules[name] = torchrl.ProbabilisticActor(
            TensorDictModule(network, in_keys=observed, out_keys=keys),
            in_keys=keys,
            out_keys=[("agents", "action")],
            distribution_class=torchrl.TanhNormal,
            return_log_prob=True,
        )
    return modules


def calls(setup: Setup) -> dict[str, Call]:
    """Return the calls to time, by name."""
    x = torch.randn(setup.batch, setup.n_agents, INPUTS)
    if setup.task == "policy":
        group = TensorDict({"observation": x}, [setup.batch, setup.n_agents])
        inputs = TensorDict({"agents": group}, [setup.batch])
        return {
            name: partial(act, policy, inputs)
            for name, policy in policies(setup).items()
        }
    if setup.task == "fused":
        alternatives = calls(replace(setup, task="policy"))
        return alternatives | {"ours": fused(setup)}
    nets = networks(setup, ACTIONS)
    if setup.task == "forward":
        return {name: partial(net, x) for name, net in nets.items()}
    return {name: partial(train, net, x) for name, net in nets.items()}


def fused(setup: Setup) -> Call:
    """Return a call of our policy, fused as in a worker."""
    observations: Any = spaces.Box(-np.inf, np.inf, (INPUTS,), np.float32)
    actions: Any = spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)
    agents = tuple(f"agent_{i}" for i in range(setup.n_agents))
    group = GroupDescription(agents, observations, actions)
    description = EnvDescription("benchmark", {"agents": group})
    runner = bound(policies(setup)["ours"], description, setup.batch)[1]
    generators = Generators(0, range(setup.batch))
    frames = itertools.cycle(range(FRAMES))

    def call() -> None:
        frame = next(frames)
        if frame == 0:
            runner.begin(FRAMES, generators)
        runner.act(frame)

    return call


def act(policy: nn.Module, inputs: TensorDict) -> object:
    """Call a policy on a shallow copy of its input."""
    return policy(inputs.copy())


def train(network: nn.Module, x: Tensor) -> None:
    """Run a forward and a backward pass."""
    network.zero_grad()
    network(x).square().mean().backward()


def build(stack: ExitStack, setup: Setup) -> dict[str, Alternative]:
    """Return the three alternatives of a row."""
    stack.enter_context(torch.set_grad_enabled(setup.task == "training"))
    stack.enter_context(set_interaction_type(InteractionType.RANDOM))
    return {name: Alternative.once(call) for name, call in calls(setup).items()}


def cases() -> list[Case]:
    """Return a row per task, kind of network, number of agents and batch size."""
    table = []
    for choice in itertools.product(
        TASKS, (False, True), (False, True), N_AGENTS, BATCHES
    ):
        setup = Setup(*choice)
        if setup.task != "fused" or setup.batch <= MOST_ENVS:
            table.append(Case(setup.title, partial(build, setup=setup)))
    return table
