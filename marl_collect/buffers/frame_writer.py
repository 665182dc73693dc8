"""Copies the frames of the running memory into a slot.

Values under ``next`` are also the root of the following frame, unless a new episode
begins there; its root is written after the reset. Large arrays are written to both
places while they are in the processor's cache. Small arrays are recorded and written
for many frames at once. Observations without ``next`` in the slot (``compact_obs``) are
kept separately where no root follows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.frame_blocks import FrameBlocks
from marl_collect.buffers.layout import TRAJ_IDS, VALID
from marl_collect.core.description import SMALL, Key
from marl_collect.core.signature import IS_INIT

Arrays = Mapping[Key, NDArray[Any]]
Pairs = Sequence[tuple[NDArray[Any], NDArray[Any]]]

LastObservation = tuple[NDArray[np.int64], int, Arrays]
"""Next observations at the end of episodes or of a slot, where no root follows: rows in
the slot, int64 ``[m]``, their frame, and the observations by key, ``[m, ...]``."""

_BLOCK = 256
"""Number of frames that are recorded before they are written. They fit in the cache."""


@final
class Sources:
    """The arrays of K environments that are written to every slot."""

    def __init__(
        self,
        memory: Arrays,
        outputs: Mapping[Key, Key],
        observed: Sequence[Key],
        outcome: Sequence[Key],
    ) -> None:
        """Divide the keys of ``memory``, ``[K, ...]``, into large and small ones.

        Args:
            memory: memory of the environments and the policy.
            outputs: keys that the policy writes, with their keys in the memory.
            observed: keys at the root and under ``next``.
            outcome: keys under ``next`` only.
        """
        self.memory = memory
        self.outputs = dict(outputs)
        self.observed = list(observed)
        self.following = [*observed, *outcome]
        self.size: int = memory["done",].shape[0]
        self.small = {
            key: memory[key]
            for key in dict.fromkeys([*outputs.values(), *self.following])
            if 0 < memory[key].nbytes <= SMALL
        }
        self.blocks = FrameBlocks(self.small)
        roots = {key: memory[key] for key in observed if key in self.small}
        self.roots = FrameBlocks(roots)
        self.large_roots = [key for key in observed if key not in self.small]


@final
class SlotWriter:
    """Writes frames of K environments into the arrays ``[K, T, ...]`` of one slot."""

    def __init__(self, slot: Arrays, sources: Sources) -> None:
        """Begin with the first frame of ``slot``.

        Attributes:
            frames: number of frames of the slot.
            last: next observations that the slot does not contain.
            writes_acts: whether ``acted`` must be called.
            omits: whether ``ended`` must be called.
        """
        self._slot = slot
        self._sources = sources
        memory = self._memory = sources.memory
        self.frames = slot["done",].shape[1]
        self._acted = self._pairs(
            {k: at for k, at in sources.outputs.items() if at not in sources.small}
        )
        large = [k for k in sources.following if k not in sources.small]
        self._stepped = self._pairs(
            {("next", *k): k for k in large if ("next", *k) in slot}
        )
        self._roots = self._pairs({k: k for k in large if k in sources.observed})
        self._is_init = memory[IS_INIT] if IS_INIT in slot else None
        self.writes_acts = bool(self._acted) or self._is_init is not None
        self._has_large = bool(self._stepped or self._roots)
        self._recorders = sources.blocks.recorders
        self._omitted = [k for k in sources.observed if ("next", *k) not in slot]
        self.omits = bool(self._omitted)
        self.last: list[LastObservation] = []
        self._written = 0
        self._due = _BLOCK
        self._begun: list[tuple[NDArray[np.int64], int]] = []
        for blocks in (sources.blocks, sources.roots):
            blocks.drain()  # An error may have left frames of another slot.
        if self._is_init is not None:
            slot["next", *IS_INIT].fill(False)
            slot[IS_INIT].fill(False)
            slot[IS_INIT][:, 0] = self._is_init
        for key in sources.observed:
            slot[key][:, 0] = memory[key]

    def acted(self, frame: int) -> None:
        """Write the policy's outputs at ``frame``."""
        for rows, source in self._acted:
            rows[frame] = source
        if self._is_init is not None:
            self._is_init.fill(False)

    def stepped(self, frame: int) -> None:
        """Write the result of the step at ``frame``."""
        for snapshot, store in self._recorders:  # FrameBlocks.record, inlined.
            store(snapshot())
        if self._has_large:
            self._write_large(frame)
        if frame + 1 == self._due:
            self.flush(frame + 1)

    def flush(self, end: int) -> None:
        """Write the recorded frames before ``end``."""
        start, self._written, self._due = self._written, end, end + _BLOCK
        if start == end:
            return
        slot, sources = self._slot, self._sources
        recorded = sources.blocks.drain()
        block = {key: values.swapaxes(0, 1) for key, values in recorded.items()}
        for key, at in sources.outputs.items():
            if at in block:
                slot[key][:, start:end] = block[at]
        for key in sources.following:
            if key in block and ("next", *key) in slot:
                slot["next", *key][:, start:end] = block[key]
        roots = min(end, self.frames - 1)
        for key in sources.observed:
            if key in block:
                slot[key][:, start + 1 : roots + 1] = block[key][:, : roots - start]
        if self._begun:
            counts = [len(rows) for rows, _ in self._begun]
            rows = np.concatenate([rows for rows, _ in self._begun])
            frames = np.repeat([frame for _, frame in self._begun], counts)
            records = np.repeat(np.arange(len(counts)), counts)
            for key, values in sources.roots.drain().items():
                slot[key][rows, frames] = values[records, rows]
            self._begun.clear()

    def ended(self, rows: NDArray[np.int64], frame: int) -> None:
        """Keep the omitted next observations of environments at ``frame``."""
        if self.omits and len(rows):
            observations = {key: self._memory[key][rows] for key in self._omitted}
            self.last.append((rows, frame, observations))

    def began(self, rows: NDArray[np.int64], frame: int) -> None:
        """Write the roots of environments whose episodes begin at ``frame``."""
        if frame < self.frames:
            self._begun.append((rows, frame))
            self._sources.roots.record()
            for key in self._sources.large_roots:
                self._slot[key][rows, frame] = self._memory[key][rows]
            if self._is_init is not None:
                self._slot[IS_INIT][rows, frame] = True

    def close(self, end: int) -> None:
        """Mark the frames before ``end`` as valid, and clear the others."""
        if VALID in self._slot:
            self._slot[VALID][:, :end] = True
        if end < self.frames:
            for array in self._slot.values():
                array[:, end:] = 0
            if TRAJ_IDS in self._slot:
                self._slot[TRAJ_IDS][:, end:] = -1

    def _write_large(self, frame: int) -> None:
        for rows, source in self._stepped:
            rows[frame] = source
        if frame + 1 < self.frames:
            for rows, source in self._roots:
                rows[frame + 1] = source

    def _pairs(self, keys: Mapping[Key, Key]) -> Pairs:
        """Return for each key its frames in the slot and its memory."""
        # A single environment's dimension is dropped: assigning plain rows is faster.
        if self._sources.size == 1:
            return [(self._slot[k][0], self._memory[at][0]) for k, at in keys.items()]
        return [
            (self._slot[k].swapaxes(0, 1), self._memory[at]) for k, at in keys.items()
        ]
