"""Runner: a loop over the library's own environment; nothing is stored."""

from typing import Any

from harness.served import System
from harness.windows import Measure
from workloads.table import WORKLOADS

from limits.drawing import acting, draw_actions, measure_loop
from limits.loops import MeltingpotLoop, PettingZooLoop


def build(system: System) -> Measure:
    """Build the environment and return what measures the loop."""
    workload = WORKLOADS[system.workload]
    env: Any = workload.stock(**system.options.get("environment", {}))
    actions = draw_actions(workload.name)
    if workload.family == "meltingpot":
        return measure_loop(MeltingpotLoop(env, actions))
    env.reset(seed=0)
    group_map = {
        name: [agent for agent in env.possible_agents if agent.startswith(f"{name}_")]
        for name in workload.groups
    }
    return measure_loop(PettingZooLoop(env, actions, group_map, acting(system)))
