"""Runner: PufferLib's Multiprocessing.

``options``: ``environments``; ``batch_size``, in environments, less than all of them
for its pool; ``zero_copy``; ``environment``, keywords of the workload.
"""

from typing import Any

import numpy as np
import pufferlib.emulation
import pufferlib.vector
from harness.served import System
from harness.windows import Measure, measure_parts
from workloads.table import WORKLOADS

from peers.storing import FRAMES, Store

_ACTIONS = 256


def build(system: System) -> Measure:
    """Start the processes and return what measures them."""
    options = system.options
    count = options["environments"]
    batch = options.get("batch_size", count)
    workload = WORKLOADS[system.workload]

    def make(**_: Any) -> Any:
        return pufferlib.emulation.PettingZooPufferEnv(
            env_creator=lambda **__: workload.stock(**options.get("environment", {}))
        )

    env: Any = pufferlib.vector.make(
        make,
        num_envs=count,
        num_workers=system.workers,
        batch_size=batch,
        zero_copy=options.get("zero_copy", True),
        backend=pufferlib.vector.Multiprocessing,
    )
    env.async_reset(0)
    rows = batch * workload.agents
    random = np.random.default_rng(0)
    (group,) = workload.groups.values()
    samples = random.integers(0, group.actions, (_ACTIONS, rows))
    steps = max(1, FRAMES // batch)
    store = Store(steps)
    number = 0

    def part() -> tuple[int, int, bool]:
        nonlocal number
        full = False
        while not full:
            observation, reward, terminated, truncated, _, ids, mask = env.recv()
            actions = samples[number % _ACTIONS]
            # Before its workers go on: without a copy, what it hands out is theirs.
            full = store.put(
                {
                    "observation": observation,
                    "action": actions,
                    "reward": reward,
                    "terminated": terminated,
                    "truncated": truncated,
                    "mask": mask,
                    "ids": ids,
                }
            )
            env.send(actions)
            number += 1
        return steps * batch, 0, False

    part()
    return measure_parts(part)
