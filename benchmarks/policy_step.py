"""Measures the time of a policy per frame in a collector, called and fused.

Times are microseconds of processor time in one process with one thread. The two
alternate in rounds, and the fastest round of each counts. Three agents observe 31
numbers each, and networks have two hidden layers of 64 units. The first rows are the
network alone; the others also sample an action and compute its log-probability. The
second table has policies made of TorchRL's modules, if TorchRL is installed. The last
table is the cost of a rollout without policy and environment: random actions in an
environment with negligible cost. Ratios carry over to other machines; absolute numbers
do not.

    python benchmarks/policy_step.py
    python benchmarks/policy_step.py --envs 8
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type

from marl_collect.core.description import EnvDescription, GroupDescription, allocate
from marl_collect.core.signature import IS_INIT
from marl_collect.models.mlp import MultiAgentMLP
from marl_collect.models.policy import make_policy
from marl_collect.policies.fused.runner import FusedRunner
from marl_collect.policies.module import ModuleRunner
from marl_collect.policies.runner import Generators, PolicyRunner

AGENTS, INPUTS, CELLS, FRAMES = 3, 31, (64, 64), 200
BOX: Any = spaces.Box(-np.inf, np.inf, (INPUTS,), np.float32)
ACTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "network only": (spaces.Box(-np.inf, np.inf, (4,), np.float32), {}),
    "categorical": (spaces.Discrete(4), {}),
    "masked categorical": (spaces.Discrete(4), {"action_mask": True}),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 4]), {}),
    "Normal": (spaces.Box(-np.inf, np.inf, (4,), np.float32), {}),
    "TanhNormal": (spaces.Box(-1.0, 1.0, (4,), np.float32), {}),
}


def policy(name: str, what: EnvDescription, *, share_params: bool) -> Any:
    """Build the policy of one row."""
    if name != "network only":
        return make_policy(what, share_params=share_params, num_cells=CELLS)
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
    what = EnvDescription("benchmark", {"agents": group})
    return bound(policy(name, what, share_params=share_params), what, n_envs)


def bound(acting: Any, what: EnvDescription, n_envs: int) -> list[PolicyRunner]:
    """Return a runner that calls a policy and one that fuses it, each with memory."""
    called = ModuleRunner(acting, what, n_envs)
    module = ModuleRunner(acting, what, n_envs)
    found: list[PolicyRunner] = [
        called,
        FusedRunner(module, what, InteractionType.RANDOM),
    ]
    for runner in found:
        memory = allocate(what.row(), (n_envs,))
        if ("agents", "action_mask") in memory:
            memory["agents", "action_mask"].fill(True)
        runner.probe(memory)
        memory |= allocate(runner.signature.memory(what), (n_envs,))
        if runner.reads_is_init:
            memory[IS_INIT] = np.zeros((n_envs, 1), np.bool_)
        runner.bind(memory)
    if not found[1].explain().startswith("Fused"):
        raise RuntimeError(found[1].explain())
    return found


def microseconds(
    calls: list[Callable[[], None]], frames: int, rounds: int
) -> list[float]:
    """Return the lowest processor time per frame of each call, over all rounds."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            begin = time.thread_time()
            call()
            spent = time.thread_time() - begin
            best[index] = min(best[index], spent * 1e6 / frames)
    return best


def slot(runner: PolicyRunner, n_envs: int) -> Callable[[], None]:
    """Return a call that acts for one slot, including noise and constants."""
    generators = Generators(0, range(n_envs))

    def call() -> None:
        runner.begin(FRAMES, generators)
        for frame in range(FRAMES):
            runner.act(frame)

    return call


def policies(n_envs: int, rounds: int) -> Table:
    """Measure every head, with shared and with separate parameters."""
    table = Table("policy", "share_params", "called", "fused", "ratio")
    for name in ACTIONS:
        for share_params in (True, False):
            acting = runners(name, n_envs, share_params=share_params)
            calls = [slot(runner, n_envs) for runner in acting]
            called, fused = microseconds(calls, FRAMES, rounds)
            cells = [f"{called:.1f}", f"{fused:.1f}", f"{called / fused:.1f}"]
            table.add_row(name, str(share_params), *cells)
    return table


def torchrl_policies() -> dict[str, tuple[Any, Any]]:
    """Return action spaces and policies of TorchRL's modules, by name."""
    from tensordict.nn import NormalParamExtractor, TensorDictSequential
    from torchrl.data import Bounded, Categorical, Composite
    from torchrl.modules import (
        AdditiveGaussianModule,
        EGreedyModule,
        MultiAgentMLP,
        OrnsteinUhlenbeckProcessModule,
        ProbabilisticActor,
        QValueModule,
        TanhDelta,
        TanhNormal,
    )

    observation, action = ("agents", "observation"), ("agents", "action")
    limits = {"low": -torch.ones(4), "high": torch.ones(4)}

    def spec(leaf: Any) -> Any:
        return Composite(agents=Composite(action=leaf, shape=(AGENTS,)))

    def network(*keys: str, outputs: int = 4, after: Any = None) -> Any:
        net: Any = MultiAgentMLP(
            INPUTS, outputs, AGENTS, centralised=False, share_params=True, depth=2,
            num_cells=64,
        )  # fmt: skip
        net = torch.nn.Sequential(net, after) if after else net
        return TensorDictModule(net, [observation], [("agents", key) for key in keys])

    def actor(kind: Any, net: Any) -> Any:
        return ProbabilisticActor(
            net,
            in_keys=net.out_keys,
            out_keys=[action],
            distribution_class=kind,
            distribution_kwargs=limits,
            return_log_prob=kind is TanhNormal,
        )

    box = spec(Bounded(-1, 1, (AGENTS, 4)))
    choices = spec(Categorical(4, (AGENTS,)))
    keys = [("agents", "action_value"), ("agents", "chosen_action_value")]
    q_values = QValueModule(
        action_value_key=keys[0],
        out_keys=[action, *keys],
        spec=choices,
        action_space="categorical",
    )
    bounded, discrete = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(4)
    delta = actor(TanhDelta, network("param"))
    normal = network("loc", "scale", outputs=8, after=NormalParamExtractor())
    clamp = TensorDictModule(lambda x: x.clamp(-1, 1), [action], [action])
    clamp.pure_forward = True
    found: dict[str, tuple[Any, list[Any]]] = {
        "QValueModule, EGreedyModule": (
            discrete,
            [
                network("action_value"),
                q_values,
                EGreedyModule(choices, action_key=action),
            ],
        ),
        "TanhDelta, AdditiveGaussianModule": (
            bounded,
            [delta, AdditiveGaussianModule(box, action_key=action)],
        ),
        "TanhDelta, OrnsteinUhlenbeckProcessModule": (
            bounded,
            [delta, OrnsteinUhlenbeckProcessModule(box.clone(), action_key=action)],
        ),
        "ProbabilisticActor, TanhNormal": (bounded, [actor(TanhNormal, normal)]),
        "a lambda": (bounded, [network("action"), clamp]),
    }
    return {k: (space, TensorDictSequential(*m)) for k, (space, m) in found.items()}


def torchrl_table(n_envs: int, rounds: int) -> Table:
    """Measure policies made of TorchRL's modules."""
    table = Table("TorchRL policy", "called", "fused", "ratio")
    for name, (space, acting) in torchrl_policies().items():
        agents = tuple(f"agent_{i}" for i in range(AGENTS))
        what = EnvDescription(
            "benchmark", {"agents": GroupDescription(agents, BOX, space)}
        )
        both = bound(acting, what, n_envs)
        calls = [slot(runner, n_envs) for runner in both]
        called, fused = microseconds(calls, FRAMES, rounds)
        table.add_row(name, f"{called:.1f}", f"{fused:.1f}", f"{called / fused:.1f}")
    return table


def rollout(rounds: int) -> Table:
    """Measure a rollout whose environment and policy have negligible cost."""
    from marl_collect.collectors import Collector
    from marl_collect.envs import PettingZooWrapper
    from marl_collect.testing.free import FreeEnv

    env = FreeEnv(AGENTS, INPUTS)
    env.reset()
    nothing: dict[str, Any] = {}

    def bare() -> None:
        for _ in range(5 * FRAMES):
            env.step(nothing)

    with Collector(
        lambda: PettingZooWrapper(FreeEnv(AGENTS, INPUTS)),
        frames_per_batch=5 * FRAMES,
        seed=0,
    ) as collector:

        def collect() -> None:
            collector.next()

        alone, all_of_it = microseconds([bare, collect], 5 * FRAMES, rounds)
    table = Table("frame of", "microseconds")
    table.add_row("the free environment alone", f"{alone:.1f}")
    table.add_row("a batch of Collector, random actions", f"{all_of_it:.1f}")
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console()
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        console.print(policies(arguments.envs, arguments.rounds))
        if find_spec("torchrl") is not None:
            console.print(torchrl_table(arguments.envs, arguments.rounds))
    console.print(rollout(arguments.rounds))


if __name__ == "__main__":
    main()
