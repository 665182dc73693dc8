"""How the running memory gets into a slot, at the right frame.

Flags and masks are written where they are other than usual, into a slot that is filled
with the usual ones before. Roots are written where an episode begins, and else, once
for a whole episode, from the ``next`` of the frame before. What has no ``next`` in the
slot (``compact_obs``) is written as a root frame by frame, and kept apart where no root
follows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.description import EnvDescription, Key, usual_flag
from marl_collect.layout import IS_INIT, TRAJ_IDS, VALID
from marl_collect.policies.runner import PolicyRunner

Arrays = Mapping[Key, NDArray[Any]]


@dataclass(frozen=True)
class LastObservation:
    """What stood under ``next`` where no root follows: at an episode's or slot's end.

    Attributes:
        row: of the slot.
        frame: of the slot.
        observations: by key, without batch dimensions.
    """

    row: int
    frame: int
    observations: Mapping[Key, NDArray[Any]]


@final
class SlotWriter:
    """Writes frames of K environments into the arrays ``[K, T, ...]`` of one slot."""

    def __init__(
        self,
        slot: Arrays,
        memory: Arrays,
        observed: Sequence[Key],
        policy: PolicyRunner,
        description: EnvDescription,
    ) -> None:
        """Pair each array of the slot with its source in ``memory``, ``[K, ...]``."""
        size = memory["done",].shape[0]
        # One environment: drop its dimension, so that plain rows are assigned.
        pick: Any = 0 if size == 1 else slice(None)

        def pair(target: Key, source: Key) -> tuple[NDArray[Any], NDArray[Any]]:
            rows = slot[target][0] if size == 1 else slot[target].swapaxes(0, 1)
            return rows, memory[source][pick]

        following = [*observed, *description.outcome()]
        kept = [key for key in following if ("next", *key) in slot]
        self._slot = slot
        self.frames = slot["done",].shape[1]
        self._acted = [pair(key, key) for key in policy.outputs]
        flags = [key for key in kept if usual_flag(key) is not None]
        self._flags, self._usual = _side_by_side({key: memory[key] for key in flags})
        for key in flags:
            slot["next", *key].fill(usual_flag(key))
        self._flagged = [pair(("next", *key), key) for key in flags]
        self._stepped = [pair(("next", *key), key) for key in kept if key not in flags]
        self._is_init = memory.get(IS_INIT)
        self._init = pair(IS_INIT, IS_INIT) if IS_INIT in slot else None
        loose = [key for key in observed if key not in kept]
        self._loose = [pair(key, key) for key in loose]
        self._sources = {key: memory[key] for key in loose}
        self.last: list[LastObservation] = []
        self._roots = [(slot[key], memory[key]) for key in observed]
        self._shift = [
            (slot[key], slot["next", *key]) for key in observed if key in kept
        ]

    def first(self) -> None:
        """Write the root of the first frame."""
        for root, source in self._roots:
            root[:, 0] = source

    def acted(self, frame: int) -> None:
        """Write what the policy computed, and whether the episode began here."""
        for rows, source in self._acted:
            rows[frame] = source
        if self._init is not None and self._is_init is not None:
            rows, source = self._init
            rows[frame] = source
            self._is_init.fill(False)

    def stepped(self, frame: int) -> bool:
        """Write the outcome of the step; return whether a flag may be set."""
        for rows, source in self._stepped:
            rows[frame] = source
        flagged = self._flags != self._usual
        if flagged:
            for rows, source in self._flagged:
                rows[frame] = source
        if self._loose and frame + 1 < self.frames:
            for rows, source in self._loose:
                rows[frame + 1] = source
        return flagged

    def ended(self, k: int, frame: int) -> None:
        """Keep what environment k's episode ended with at ``frame``."""
        if self._sources:
            kept = {key: source[k].copy() for key, source in self._sources.items()}
            self.last.append(LastObservation(k, frame, kept))

    def began(self, k: int, frame: int) -> None:
        """Write the root of environment k, whose episode begins at ``frame``."""
        if frame < self.frames:
            for root, source in self._roots:
                root[k, frame] = source[k]

    def finish(self, k: int, begins: Sequence[int], end: int) -> None:
        """Write the roots inside each episode, which begin at ``begins``.

        Args:
            k: the environment.
            begins: first frame of each episode.
            end: first frame that was not stepped.
        """
        if begins[-1] < end:
            self.ended(k, end - 1)  # The slot ends, the episode goes on.
        for begin, stop in zip(begins, [*begins[1:], end], strict=True):
            if stop - begin > 1:
                for root, following in self._shift:
                    root[k, begin + 1 : stop] = following[k, begin : stop - 1]

    def close(self, end: int) -> None:
        """Mark which frames are valid, and clear the others."""
        if VALID in self._slot:
            self._slot[VALID][:, :end] = True
        if end < self.frames:
            for array in self._slot.values():
                array[:, end:] = 0
            if TRAJ_IDS in self._slot:
                self._slot[TRAJ_IDS][:, end:] = -1


def _side_by_side(arrays: Arrays) -> tuple[memoryview, bytes]:
    """Return the memory of all ``arrays``, and what usually stands there.

    Where they are not one after the other, the two that are returned differ for ever.
    """
    usual = b"".join(
        bytes([bool(usual_flag(key))]) * array.size for key, array in arrays.items()
    )
    values = list(arrays.values())
    base: Any = values[0].base if values else None
    if isinstance(base, np.ndarray) and base.flags.c_contiguous:
        begin = _address(values[0]) - _address(base)
        places = np.cumsum([_address(values[0]), *(each.nbytes for each in values)])
        if [_address(each) for each in values] == places[:-1].tolist():
            buffer: Any = base
            whole = memoryview(buffer).cast("B")
            return whole[begin : begin + len(usual)], usual
    return memoryview(b""), b"unknown"


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
