"""Runner: PufferLib's Multiprocessing.

``options``: ``environments``; ``batch_size``, in environments, less than all of them
for its pool; ``zero_copy``; ``environment``, keywords of the workload.
"""

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import pufferlib.emulation
import pufferlib.vector
from harness.served import System
from harness.windows import Measure, measure_parts
from workloads.table import WORKLOADS

FRAMES = 1000
_ACTIONS = 256
_WORD = 8


@final
class Store:
    """Memory for some steps of what an environment hands out.

    It is allocated once, and every byte is read when it is full: the same work as for
    collectors.
    """

    def __init__(self, steps: int) -> None:
        """Reserve nothing yet: shapes are known after the first step."""
        self._steps = steps
        self._memory: dict[str, Any] = {}
        self._next = 0

    def put(self, arrays: Mapping[str, Any]) -> bool:
        """Store a step; return whether the memory is full and was read."""
        for name, values in arrays.items():
            array = np.asarray(values)
            if name not in self._memory:
                shape = (self._steps, *array.shape)
                self._memory[name] = np.empty(shape, array.dtype)
            self._memory[name][self._next] = array
        self._next += 1
        if self._next < self._steps:
            return False
        self._next = 0
        for memory in self._memory.values():
            flat = memory.reshape(-1)
            (flat if flat.nbytes % _WORD else flat.view(np.int64)).sum()
        return True


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
