"""Runner: direct loops that meet at every step, and a trainer that does nothing.

What our ParallelEnv of one group could reach if its trainer took no time: nobody draws
an action, keeps a frame or reads one, and all wait where and as ParallelEnv's do.
``options``: ``environments``, shared out evenly; ``environment``, keywords of the
workload.
"""

from harness.served import System
from harness.windows import Measure, measure_parts
from workloads.adapters import our_factory

from limits.drawing import draw_actions
from limits.loops import N_ACTIONS, OurLoop
from limits.posting import Posting, Step
from marl_collect.parallel_env.cpus import affinity, pin
from marl_collect.parallel_env.options import spin_seconds

_PART = 50
"""Joint steps between two looks at the clock."""


def build(system: System) -> Measure:
    """Start the processes and return what measures their joint steps."""
    options = system.options
    count, workers = options["environments"], system.workers
    share = system.shares(workers)
    make = our_factory(system.workload, options.get("environment", {}))

    def stepper(worker: int) -> Step:
        pin(worker, workers, affinity())
        actions = draw_actions(system.workload)
        loops = [OurLoop(make(), actions) for _ in range(share)]
        number = 0

        def step() -> None:
            nonlocal number
            for loop in loops:
                if loop.over:
                    loop.reset(number)
                loop.step(number % N_ACTIONS)
            number += 1

        return step

    posting = Posting(workers, stepper, spin=spin_seconds(workers))

    def part() -> tuple[int, int, bool]:
        for _ in range(_PART):
            posting.step()
        return _PART * count, 0, False

    part()
    return measure_parts(part)
