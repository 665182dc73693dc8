"""What vectorisers hand out, stored as a collector would, and read.

The frames of all environments go into memory that is allocated once, and every byte is
read when it is full: the same work for everybody.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from harness.windows import Measure, measure_parts

FRAMES = 1000
_WORD = 8
_ACTIONS = 256

Step = Callable[[Any], tuple[Mapping[str, Any], int]]
"""Take actions; return arrays by name, and how many episodes ended."""


@final
class Store:
    """Memory for some steps of what an environment hands out."""

    def __init__(self, steps: int) -> None:
        """Reserve nothing yet: shapes are known after the first step."""
        self._steps = steps
        self._memory: dict[str, Any] = {}
        self._next = 0

    def put(self, arrays: Mapping[str, Any]) -> bool:
        """Store a step; return whether the memory is full and was read."""
        for name, given in arrays.items():
            array = np.asarray(given)
            if name not in self._memory:
                shape = (self._steps, *array.shape)
                self._memory[name] = np.empty(shape, array.dtype)
            self._memory[name][self._next] = array
        self._next += 1
        if self._next < self._steps:
            return False
        self._next = 0
        for held in self._memory.values():
            flat = held.reshape(-1)
            (flat if flat.nbytes % _WORD else flat.view(np.int64)).sum()
        return True


def measure_steps(step: Step, draw: Callable[[], Any], environments: int) -> Measure:
    """Return a measure of steps with actions that were drawn beforehand.

    Args:
        step: of all ``environments`` at once.
        draw: one joint action for all of them.
        environments: how many frames a step is.
    """
    drawn = [draw() for _ in range(_ACTIONS)]
    steps = max(1, FRAMES // environments)
    store = Store(steps)
    number = 0

    def part() -> tuple[int, int, bool]:
        nonlocal number
        full, episodes = False, 0
        while not full:
            actions = drawn[number % _ACTIONS]
            arrays, ended = step(actions)
            full = store.put({**arrays, **_named(actions)})
            episodes += ended
            number += 1
        return steps * environments, episodes, episodes > 0

    part()
    return measure_parts(part)


def _named(actions: Any) -> dict[str, Any]:
    if isinstance(actions, Mapping):
        return {f"action {name}": value for name, value in actions.items()}
    return {"action": actions}
