"""Chooses the frames in which a recording is compared with its module.

A recording repeats what the module computed once. What the module's code reads from
outside, such as a global, may change later, and no look at the module shows that. So
now and then the module is called as well: in the first frame of ten slots, then about
every 10,000 frames, or in the first frame after its tensors changed once 5,000 frames
have passed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Key

Outputs = Mapping[Key, NDArray[Any]]

NEVER = -1
"""Number of no frame."""

_INTERVAL = 10_000
"""A comparison calls the module, which takes as long as 30 to 100 repeated frames. Of
the time of a policy that is 0 to 2 %. With 4,000 frames it would be 2 to 6 %, with
2,000 it would be 4 to 10 %."""
_FREE = 10
"""Comparisons that are always made."""
_SPREAD = 2654435761
"""Knuth's multiplicative hash. Generators of random numbers are the user's."""
_RTOL, _OF_LARGEST, _OF_DENSITY = 1e-4, 1e-5, 1e-2
"""Tolerances, relative to a number, to the largest number of its output, and of the
logarithm of a density. Near a bound, the last bit of an action moves the latter."""


@final
class SpotCheck:
    """Chooses the frames in which the module is called beside its recording."""

    def __init__(self) -> None:
        """Begin before the first frame."""
        self._frames = self._made = 0
        self._earliest, self._next = 0, _INTERVAL
        self._versions: Sequence[int] | None = None

    def choose(self, frames: int, versions: Sequence[int]) -> int:
        """Return the frame of the next slot to compare, or ``NEVER``.

        Args:
            frames: of the slot.
            versions: of the policy's tensors; others mean an update.
        """
        first, self._frames = self._frames, self._frames + frames
        is_new, self._versions = versions != self._versions, versions
        if frames and (self._made < _FREE or (is_new and first >= self._earliest)):
            frame = 0
        elif self._next < self._frames:
            frame = max(self._next - first, 0)
        else:
            return NEVER
        self._made += 1
        self._earliest = first + frame + _INTERVAL // 2
        self._next = self._earliest + self._made * _SPREAD % 2**32 % _INTERVAL
        return frame


def outputs_agree(recorded: Outputs, called: Outputs) -> bool:
    """Return whether outputs are equal but for rounding; NaN equals NaN."""
    return all(_agrees(key, recorded[key], array) for key, array in called.items())


def _agrees(key: Key, recorded: NDArray[Any], called: NDArray[Any]) -> bool:
    if recorded.tobytes() == called.tobytes():
        return True
    if called.dtype.kind not in "fc" or not called.size:
        return bool(np.array_equal(recorded, called))
    finite = np.isfinite(called)
    largest = float(np.abs(called, where=finite, out=np.zeros(called.shape)).max())
    density = _OF_DENSITY if "log_prob" in key[-1] else 0.0
    tolerance = max(_OF_LARGEST * largest, density)
    return bool(np.allclose(recorded, called, _RTOL, tolerance, equal_nan=True))
