"""Time of a policy per frame in a collector, called and fused.

Three agents observe 31 numbers each, and networks have two hidden layers of 64 units.
"network only" is the network alone; the other policies also sample an action and
compute its log-probability. The last row is the cost of a rollout without policy and
environment: random actions in an environment with negligible cost.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from harness.turns import Alternative
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type

from cases.case import Case, collecting
from marl_collect.core.description import EnvDescription, GroupDescription, allocate
from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.models.policy import make_policy
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import Generators, PolicyRunner

AGENTS, INPUTS, CELLS, FRAMES = 3, 31, (64, 64), 200
ENVS = (1, 8)
BOX: Any = spaces.Box(-np.inf, np.inf, (INPUTS,), np.float32)
ACTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "network only": (spaces.Box(-np.inf, np.inf, (4,), np.float32), {}),
    "categorical": (spaces.Discrete(4), {}),
    "masked categorical": (spaces.Discrete(4), {"action_mask": True}),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 4]), {}),
    "Normal": (spaces.Box(-np.inf, np.inf, (4,), np.float32), {}),
    "TanhNormal": (spaces.Box(-1.0, 1.0, (4,), np.float32), {}),
}


def policy(name: str, description: EnvDescription, *, share_params: bool) -> Any:
    """Build the policy of one row."""
    if name != "network only":
        return make_policy(description, share_params=share_params, num_cells=CELLS)
    network = MultiAgentMLP(
        INPUTS,
        4,
        AGENTS,
        centralised=False,
        share_params=share_params,
        num_cells=CELLS,
    )
    return TensorDictModule(
        network, [("agents", "observation")], [("agents", "action")]
    )


def runners(name: str, n_envs: int, *, share_params: bool) -> list[PolicyRunner]:
    """Return runners of the policy, called and fused, each bound to its own memory."""
    space, options = ACTIONS[name]
    agents = tuple(f"agent_{i}" for i in range(AGENTS))
    group = GroupDescription(agents, BOX, space, **options)
    description = EnvDescription("benchmark", {"agents": group})
    return bound(
        policy(name, description, share_params=share_params), description, n_envs
    )


def bound(acting: Any, description: EnvDescription, n_envs: int) -> list[PolicyRunner]:
    """Return a runner that calls a policy and one that fuses it, each with memory."""
    unfused = ModuleRunner(acting, description, n_envs)
    how = InteractionType.RANDOM
    fused = FusedRunner(ModuleRunner(acting, description, n_envs, how=how))
    for runner in (unfused, fused):
        memory = allocate(description.row(), (n_envs,))
        if ("agents", "action_mask") in memory:
            memory["agents", "action_mask"].fill(True)
        runner.probe(memory)
        memory |= allocate(runner.signature.memory(description), (n_envs,))
        runner.bind(memory)
    if not fused.explain().startswith("Fused"):
        raise RuntimeError(fused.explain())
    return [unfused, fused]


def slot(runner: PolicyRunner, n_envs: int) -> Alternative:
    """Return the call that acts for one slot, including noise and constants."""
    generators = Generators(0, range(n_envs))

    def call() -> float:
        runner.begin(FRAMES, generators)
        for frame in range(FRAMES):
            runner.act(frame)
        return FRAMES

    return Alternative(call)


def both(
    stack: ExitStack, build: Callable[[], list[PolicyRunner]], n_envs: int
) -> dict[str, Alternative]:
    """Return the fused and the called policy."""
    stack.enter_context(torch.no_grad())
    stack.enter_context(set_interaction_type(InteractionType.RANDOM))
    unfused, fused = build()
    return {"fused": slot(fused, n_envs), "called": slot(unfused, n_envs)}


def cases() -> list[Case]:
    """Return a row per policy, with one environment and with eight."""
    table = []
    for n_envs, name, share_params in itertools.product(ENVS, ACTIONS, (True, False)):
        kind = "shared" if share_params else "separate"
        build = partial(runners, name, n_envs, share_params=share_params)
        title = f"{name}, {kind} parameters, envs: {n_envs}"
        table.append(Case(title, partial(both, build=build, n_envs=n_envs), "frame"))
    return [*table, Case("a rollout without policy and environment", rollout, "frame")]


def rollout(stack: ExitStack) -> dict[str, Alternative]:
    """Return batches of an environment with negligible cost, and its steps alone."""
    from workloads.free import FreeEnv

    from marl_collect.collectors import Collector
    from marl_collect.envs import PettingZooWrapper

    env = FreeEnv(AGENTS, INPUTS)
    env.reset()
    nothing: dict[str, Any] = {}
    collector = stack.enter_context(
        Collector(
            lambda: PettingZooWrapper(FreeEnv(AGENTS, INPUTS)),
            frames_per_batch=5 * FRAMES,
            seed=0,
        )
    )

    def bare() -> float:
        for _ in range(FRAMES):
            env.step(nothing)
        return FRAMES

    return {
        "the environment alone": Alternative(bare),
        "Collector, random actions": collecting(collector),
    }
