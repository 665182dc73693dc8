"""Splits rollouts into trajectories, and joins trajectories over batches."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.buffers.layout import STEP_COUNT, Layout
from marl_collect.core.description import Field, Key
from marl_collect.core.replay import frames_of
from marl_collect.core.tensordicts import (
    assemble,
    flatten,
    indexable,
    key_path,
    take_rows,
)

TrajFormat = Literal["padded", "cat"]
Arrays = dict[Key, NDArray[Any]]
LONGEST = 100_000
"""Frames of a trajectory after which its end is no longer expected without a limit.

Whoever waits for it would wait for ever, and all frames since its beginning are kept.
Nobody waits for ever with ``max_frames_per_traj``, whose key is ``step_count``.
"""
_IDS = ("collector", "traj_ids")
_MASK = ("collector", "mask")
_NO_FRAMES = "The batch has no valid frames to split into trajectories."


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: str | tuple[str, ...] | None = None,
    trajectory_key: str | tuple[str, ...] | None = None,
    done_key: str | tuple[str, ...] | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """Split rollouts into trajectories and pad them with zeros.

    A trajectory that continues in another batch is cut at the end of this one. Invalid
    frames (id -1, or False in the mask) are dropped first.

    Args:
        rollout_tensordict: ``[*B, T]``.
        prefix: parent key of ``traj_ids`` and ``mask``; by default ``"collector"`` if
            present, else the root.
        trajectory_key: key of the ids; by default ``(prefix, "traj_ids")``.
        done_key: flag that ends a trajectory if there are no ids, with or without the
            leading ``"next"``; by default ``"done"``.
        as_nested: return nested tensors instead of padded ones: True as TorchRL does,
            with the batch size ``[n, -1]``; ``torch.jagged`` for that layout, with the
            batch size ``[n]``.

    Returns:
        ``[n, longest]``, with bool ``mask`` beside the ids, True where valid.

    Raises:
        ValueError: if ``as_nested`` is another layout, or there are no valid frames.
    """
    if as_nested not in (False, True, torch.jagged, torch.strided):
        raise ValueError(
            "as_nested must be True, False, torch.jagged or torch.strided, but is "
            f"{as_nested!r}."
        )
    data = rollout_tensordict
    ids_key = _ids_key(data, prefix, trajectory_key)
    mask_key = (*ids_key[:-1], "mask")
    if 0 in data.shape:
        raise ValueError(_NO_FRAMES)
    flat = data.reshape(-1)
    starts = torch.zeros(flat.shape[0], dtype=torch.bool, device=flat.device)
    starts[:: data.shape[-1]] = True
    valid = torch.ones_like(starts)
    ids = flat.get(ids_key, None)
    if ids is None:
        flag = key_path(done_key or "done")
        ahead = flag if flag[0] == "next" else ("next", *flag)
        done = flat[ahead].reshape(-1)
        starts[1:] |= done[:-1]
    else:
        starts[1:] |= ids[1:] != ids[:-1]
        valid &= ids != -1
    if mask_key in flat.keys(include_nested=True):
        valid &= flat.get(mask_key)
    # The first valid frame of a row begins a piece, even after invalid frames.
    pieces = starts.cumsum(0)[valid]
    if not len(pieces):
        raise ValueError(_NO_FRAMES)
    flat = flat[valid]
    starts = torch.ones_like(pieces, dtype=torch.bool)
    starts[1:] = pieces[1:] != pieces[:-1]
    begins = starts.nonzero().flatten()
    ends = torch.cat([begins[1:], begins.new_tensor([flat.shape[0]])])
    if as_nested == torch.jagged:
        return _jagged(flat, torch.cat([begins, ends[-1:]]))
    if as_nested:
        return _nested(flat, (ends - begins).tolist())
    return _padded(flat, begins, ends, mask_key)


def _ids_key(
    data: TensorDictBase,
    prefix: str | tuple[str, ...] | None,
    trajectory_key: str | tuple[str, ...] | None,
) -> tuple[str, ...]:
    if trajectory_key is not None:
        return key_path(trajectory_key)
    if prefix is not None:
        return (*key_path(prefix), "traj_ids")
    if "collector" in data.keys():
        return _IDS
    return ("traj_ids",)


def _padded(
    flat: TensorDictBase,
    begins: torch.Tensor,
    ends: torch.Tensor,
    mask_key: tuple[str, ...],
) -> TensorDictBase:
    lengths = ends - begins
    offsets = torch.arange(int(lengths.max()), device=flat.device)
    mask = offsets < lengths[:, None]
    index = torch.where(mask, begins[:, None] + offsets, begins[:, None])
    out = take_rows(flat, index.reshape(-1)).reshape(index.shape)
    invalid = ~mask
    if bool(invalid.any()):
        for leaf in out.values(include_nested=True, leaves_only=True):
            indexable(leaf)[invalid] = 0
    out.set(mask_key, mask)
    out.names = [None, "time"]
    return out


def _nested(flat: TensorDictBase, lengths: list[int]) -> Any:
    def nested(leaf: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(leaf.split(lengths)))

    return flat.apply(nested, batch_size=[len(lengths), -1])


def _jagged(flat: TensorDictBase, offsets: torch.Tensor) -> Any:
    def jagged(leaf: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(leaf, offsets)

    return flat.apply(jagged, batch_size=[len(offsets) - 1])


@final
@dataclass(frozen=True)
class _Pieces:
    """Parts of trajectories, each from one row of one batch.

    Attributes:
        numbers: which trajectory a piece belongs to.
        starts: position of its first frame in the assembler's memory.
        lengths: number of its frames.
    """

    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> "_Pieces":
        return _Pieces(*(array[index] for array in vars(self).values()))

    def __add__(self, other: "_Pieces") -> "_Pieces":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Pieces(*map(np.concatenate, pairs))

    def positions(self) -> NDArray[np.int64]:
        """Return the position of every frame, piece by piece."""
        return frames_of(self.starts, self.lengths)


_NO_PIECES = _Pieces(*[np.zeros(0, np.int64)] * 3)


def _check_lengths(unfinished: _Pieces) -> None:
    """Check that no trajectory seems to be endless.

    Raises:
        RuntimeError: if one is longer than ``LONGEST``.
    """
    if not len(unfinished) or unfinished.lengths.sum() <= LONGEST:
        return
    numbers, which = np.unique(unfinished.numbers, return_inverse=True)
    lengths = np.bincount(which, unfinished.lengths)
    if lengths.max() > LONGEST:
        traj_id = int(numbers[lengths.argmax()])
        raise RuntimeError(
            f"Whole trajectories were requested, but episode {traj_id & 0xFFFFFFFF} of "
            f"environment {traj_id >> 32} has not ended after {int(lengths.max()):,} "
            "frames. If episodes may never end, or are longer, pass "
            "max_frames_per_traj, which truncates them."
        )


_FIRST = 1
"""First position of a frame. Position 0 has zeros, which pad short trajectories."""
_FULL, _GROWTH = 1.5, 2
"""Size of the memory, relative to the frames in it: when a larger one is made, and of
that one. With a third of it free, frames move seldom."""


@final
class TrajectoryAssembler:
    """Joins the pieces of trajectories over batches until they are complete.

    All batches are in one memory, ``[positions, ...]`` per key, each after the one
    before. When it is full, frames that are still needed move to its beginning.
    Complete trajectories are gathered with one call per key.

    Batches of a trajectory that is longer than ``LONGEST`` raise a RuntimeError, unless
    the collector limits their length.
    """

    def __init__(
        self,
        wanted: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None,
    ) -> None:
        """Start empty.

        Args:
            wanted: returns which of the trajectories with these ids to keep. None
                keeps all.
        """
        self._wanted = wanted
        self._n_agents: dict[str, int] = {}  # By group.
        self._memory: Arrays = {}
        self._capacity = 0
        self._end = _FIRST
        self._open = _NO_PIECES
        # Numbered in the order of their ends.
        self._complete = _NO_PIECES
        self._taken = self._ended = 0
        # Memory of trajectories that were taken and released.
        self._spare: deque[NDArray[np.uint8]] = deque(maxlen=1)

    def __len__(self) -> int:
        """Number of complete trajectories that were not taken yet."""
        return self._ended - self._taken

    def add(self, batch: TensorDictBase) -> None:
        """Add the frames of a batch ``[B, T]``, which are copied."""
        if not self._memory:
            self._begin(batch)
        rows, frames = batch.shape
        start = self._reserve(rows * frames)
        for key, leaf in flatten(batch).items():
            block = self._memory[key][start : self._end]
            # NumPy, because several threads of torch take longer on busy processors.
            values = leaf.detach().cpu().numpy()
            block.reshape(rows, frames, *block.shape[1:])[...] = values
        ids = self._memory[_IDS][start : self._end].reshape(rows, frames)
        starts = np.ones_like(ids, np.bool_)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        (first,) = starts.ravel().nonzero()
        lengths = np.diff(first, append=ids.size)
        pieces = _Pieces(ids.ravel()[first], start + first, lengths)
        done: Any = self._memory["next", "done"][start + first + lengths - 1]
        done = done.any(tuple(range(1, done.ndim)))
        valid = pieces.numbers != -1
        self._join(pieces[valid], done[valid])

    def take(self, form: TrajFormat, most: int | None = None) -> TensorDictBase:
        """Return complete trajectories, in the order of their ends.

        Args:
            form: ``"padded"`` returns ``[k, longest]`` with ``("collector", "mask")``,
                ``"cat"`` returns ``[sum of T]``.
            most: largest number of trajectories; None for all.
        """
        count = len(self) if most is None else min(most, len(self))
        numbers = self._complete.numbers - self._taken
        border = int(np.searchsorted(numbers, count))
        pieces, self._complete = self._complete[:border], self._complete[border:]
        self._taken += count
        positions = pieces.positions()
        if form == "cat":
            return self._gather(positions)
        lengths = np.bincount(numbers[:border], pieces.lengths).astype(np.int64)
        valid = np.arange(lengths.max()) < lengths[:, None]
        index = np.zeros(valid.shape, np.int64)
        index[valid] = positions
        out = self._gather(index)
        out.set(_MASK, torch.from_numpy(valid))
        return out

    def drop_open(self) -> None:
        """Drop incomplete trajectories, after a reset of the environments."""
        self._open = _NO_PIECES

    def held(self) -> TensorDictBase | None:
        """Return the frames of all trajectories that were not taken, ``[N]``.

        They follow each other, complete ones first. ``add`` takes them as one row. None
        before the first batch.
        """
        if not self._memory:
            return None
        unfinished = self._open[np.argsort(self._open.numbers, kind="stable")]
        return self._gather((self._complete + unfinished).positions())

    def _join(self, pieces: _Pieces, done: NDArray[np.bool_]) -> None:
        """Continue or complete trajectories with pieces of the newest batch."""
        present = self._open + pieces
        _, environment = np.unique(present.numbers >> 32, return_inverse=True)
        latest = np.empty(len(present), np.int64)
        latest[environment] = present.numbers  # The last one of each remains.
        continues = present.numbers == latest[environment]
        if self._wanted is not None:
            wanted = self._wanted(pieces.numbers)
            old = np.ones(len(self._open), np.bool_)
            continues &= np.concatenate([old, wanted])
            done = done & wanted
        ended = pieces.numbers[done]
        order = np.argsort(ended)
        rank = np.searchsorted(ended, present.numbers, sorter=order)
        rank = order.take(rank, mode="clip") if len(ended) else rank
        whole = np.isin(present.numbers, ended)
        complete, rank = present[whole], rank[whole]
        by_end = np.argsort(rank, kind="stable")
        numbers = rank + self._ended
        complete = replace(complete, numbers=numbers)
        self._complete += complete[by_end]
        self._ended += len(ended)
        # Others were cut and will not continue.
        self._open = present[continues & ~whole]
        if STEP_COUNT not in self._memory:
            _check_lengths(self._open)

    def _begin(self, batch: TensorDictBase) -> None:
        self._n_agents = {
            name: part.shape[2]
            for name, part in batch.items()
            if isinstance(part, TensorDictBase) and part.ndim > batch.ndim
        }
        for key, leaf in flatten(batch[:1, :0]).items():
            values = leaf.detach().cpu().numpy()[0]
            self._memory[key] = np.zeros((_FIRST, *values.shape[1:]), values.dtype)

    def _reserve(self, frames: int) -> int:
        """Return the position at which ``frames`` further frames fit.

        If they do not fit behind the others, these move to the beginning.
        """
        if self._end + frames > self._capacity:
            present = self._open + self._complete
            positions = present.positions()
            if _FIRST + _FULL * (len(positions) + frames) > self._capacity:
                self._capacity = _FIRST + _GROWTH * (len(positions) + frames)
            self._end = _FIRST + len(positions)
            for key, memory in self._memory.items():
                values, target = memory.take(positions, 0), memory
                if len(memory) < self._capacity:
                    target = np.empty((self._capacity, *memory.shape[1:]), memory.dtype)
                    target[:_FIRST] = 0
                    self._memory[key] = target
                target[_FIRST : self._end] = values
            present.starts[...] = _FIRST + present.lengths.cumsum() - present.lengths
            count = len(self._open)
            self._open, self._complete = present[:count], present[count:]
        start, self._end = self._end, self._end + frames
        return start

    def _gather(self, positions: NDArray[np.int64]) -> TensorDictBase:
        """Return the frames at these positions, in the shape of ``positions``."""
        fields = {k: Field(v.shape[1:], v.dtype) for k, v in self._memory.items()}
        layout = Layout.plan(fields, (1, positions.size))
        frames: dict[Key, torch.Tensor] = {}
        for key, (array,) in layout.arrays(self._lend(layout.nbytes)).items():
            out = array.reshape(*positions.shape, *array.shape[1:])
            self._memory[key].take(positions, 0, out=out, mode="clip")
            frames[key] = torch.from_numpy(out)
        return assemble(frames, positions.shape, self._n_agents, time=True)

    def _lend(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory that is used again when its last view is gone."""
        block = self._spare.pop() if self._spare else None
        if block is None or len(block) < nbytes:
            block = np.empty(nbytes + nbytes // 4, np.uint8)
        # NumPy's views of it refer to this array, because its base is no array.
        lent = np.frombuffer(block.data, np.uint8, nbytes)
        weakref.finalize(lent, self._spare.append, block).atexit = False
        return lent
