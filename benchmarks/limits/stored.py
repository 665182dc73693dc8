"""Runner: a loop over our adapter that stores every frame, and reads what it stored.

It keeps what a collector must hand out, in memory of its own: what stands at the root
and under ``next`` at both places, everything else once. ``options["frames"]`` are a
batch; when they are there, every byte is read.
"""

from collections.abc import Iterable, Mapping
from typing import Any, final

import numpy as np
from harness.served import System
from harness.windows import Measure
from numpy.typing import NDArray
from workloads.adapters import our_factory

from limits.drawing import acting, draw_actions, measure_loop
from limits.loops import OurLoop
from marl_collect.core.description import ALIGNMENT, Key

_WORD = 8


def build(system: System) -> Measure:
    """Build the environment and return what measures the loop."""
    env = our_factory(system.workload, system.options.get("environment", {}))()
    loop = OurLoop(env, draw_actions(system.workload), acting(system))
    frames = system.options["frames"]
    storing = StoringLoop(loop, env.description.observed(), frames)
    return measure_loop(storing, frames, storing.read)


@final
class StoringLoop:
    """Our environment, whose frames are kept.

    Attributes:
        stored: bytes ``[frames, n]``, for each piece of the row's memory: of what is
            observed before the step and after it, then of the rest.
    """

    def __init__(self, loop: OurLoop, observed: Iterable[Key], frames: int) -> None:
        """Reserve memory for ``frames`` of what is ``observed``, and of the rest."""
        self._loop = loop
        row = loop.row
        names = set(observed)
        twice = pieces({key: array for key, array in row.items() if key in names})
        next_only = pieces(
            {key: array for key, array in row.items() if key not in names}
        )
        self._roots = [(_reserve(frames, block), block) for block in twice]
        self._nexts = [
            (_reserve(frames, block), block) for block in [*twice, *next_only]
        ]
        self.stored = [memory for memory, _ in [*self._roots, *self._nexts]]
        self._frame = 0

    @property
    def over(self) -> bool:
        """Whether the episode ended."""
        return self._loop.over

    def reset(self, seed: int) -> None:
        """Begin an episode."""
        self._loop.reset(seed)

    def step(self, number: int) -> None:
        """Step with the joint action of this number, or with the policy's."""
        frame = self._frame
        for memory, block in self._roots:
            memory[frame, : block.size] = block
        self._loop.step(number)
        for memory, block in self._nexts:
            memory[frame, : block.size] = block
        self._frame += 1

    def read(self) -> None:
        """Read every byte that is stored, and begin anew."""
        for memory in self.stored:
            memory.view(np.int64).sum()
        self._frame = 0


def pieces(arrays: Mapping[Key, NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Return the memory of the row's arrays, in as few pieces as it comes in."""
    addresses = {array.ctypes.data: array for array in arrays.values() if array.size}
    spans: list[list[int]] = []
    for begin, array in sorted(addresses.items()):
        if spans and begin - spans[-1][1] <= ALIGNMENT:
            spans[-1][1] = begin + array.nbytes
        else:
            spans.append([begin, begin + array.nbytes])
    owner: Any = next(iter(addresses.values())).base
    start = owner.ctypes.data
    return [owner[begin - start : end - start] for begin, end in spans]


def _reserve(frames: int, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return zeroed memory for a piece of every frame, in whole words."""
    memory = np.empty((frames, -(-block.size // _WORD) * _WORD), np.uint8)
    memory.fill(0)  # No page is missing when it is first written.
    return memory
