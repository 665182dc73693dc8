"""Runner: a loop over our adapter, as a worker steps it; nothing is collected."""

from harness.served import System
from harness.windows import Measure
from workloads.adapters import our_factory

from limits.drawing import acting, draw_actions, measure_loop
from limits.loops import OurLoop


def build(system: System) -> Measure:
    """Build the environment and return what measures the loop."""
    env = our_factory(system.workload, system.options.get("environment", {}))()
    return measure_loop(OurLoop(env, draw_actions(system.workload), acting(system)))
