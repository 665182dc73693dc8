"""What vectorisers hand out, stored as a collector would, and read.

The frames of all environments go into memory that is allocated once, and every byte is
read when it is full: the same work for everybody.
"""

from collections.abc import Mapping
from typing import Any, final

import numpy as np

FRAMES = 1000
_WORD = 8


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
