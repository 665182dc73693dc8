"""Stores and restores the next observations that ``compact_obs=True`` omits.

Within an episode, the next observation of a frame is the root observation of the
following frame. At the end of an episode or of the batch no frame follows, and the next
observation is stored under ``("collector", "last_observations")``. Every frame has an
id, so the batch may be cut, reordered and joined first: ``restore_next`` finds the
stored observations by id, and sees where a following frame is missing.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from marl_collect.buffers.frame_writer import LastObservation
from marl_collect.buffers.layout import FRAME_IDS
from marl_collect.core.description import Key
from marl_collect.core.tensordicts import indexable

KEY = ("collector", "last_observations")

_ROW_SHIFT = 32
"""Ids of a row are apart from those of other rows, so no frame follows another row."""


@dataclass(frozen=True)
class LastObservations:
    """The m last observations of one batch ``[B, T]``.

    Attributes:
        rows: environment of each one, int64 ``[m]``.
        frames: frame of each one, int64 ``[m]``.
        observations: observations by key, ``[m, n_agents, ...]``.
        first_id: id of the batch's first frame, positive. It is a digest of the other
            attributes and of the collector's progress, so equal runs have equal ids.
    """

    rows: torch.Tensor
    frames: torch.Tensor
    observations: Mapping[Key, torch.Tensor]
    first_id: int

    @property
    def ids(self) -> torch.Tensor:
        """Id of each one's frame, int64 ``[m]``."""
        return self.first_id + (self.rows << _ROW_SHIFT) + self.frames


def gather(last: Sequence[LastObservation], delivered: int) -> LastObservations | None:
    """Join the last observations of a batch.

    Args:
        last: in any order.
        delivered: number of frames that the collector has delivered before.
    """
    if not last:
        return None
    all_rows, all_frames, parts = zip(*last, strict=True)
    rows = np.concatenate(all_rows)
    frames = np.repeat(all_frames, list(map(len, all_rows)))
    observations = {
        key: np.concatenate([part[key] for part in parts]) for key in parts[0]
    }
    digest = hashlib.blake2b(str(delivered).encode(), digest_size=8)
    for values in (rows, frames, *observations.values()):
        digest.update(values.data)
    return LastObservations(
        rows=torch.from_numpy(rows),
        frames=torch.from_numpy(frames),
        observations={k: torch.from_numpy(v) for k, v in observations.items()},
        first_id=1 + (int.from_bytes(digest.digest()) >> 2),
    )


def attach(
    batch: TensorDict, last: LastObservations | None, ends: Sequence[int]
) -> TensorDict:
    """Store ``last`` in its batch, and number the frames.

    Args:
        batch: ``[B, T]``.
        last: its last observations.
        ends: number of valid frames of each row. The others have the id 0.
    """
    if last is not None:
        rows, frames = (torch.arange(size, device="cpu") for size in batch.shape)
        ids = last.first_id + (rows << _ROW_SHIFT)[:, None] + frames
        ids[frames >= torch.tensor(ends, device="cpu")[:, None]] = 0
        batch.get(FRAME_IDS).copy_(ids)
        batch.get("collector").set_non_tensor(KEY[1], last)
    return batch


def restore_next(batch: TensorDictBase) -> TensorDictBase:
    """Write ``("next", g, "observation")`` into a batch, and return the batch.

    It then equals a batch that was collected without ``compact_obs``. Before that, rows
    may be chosen, reordered or split into trajectories, and batches may be joined.

    Args:
        batch: ``[*B, T]`` of a collector with ``compact_obs=True``.

    Raises:
        KeyError: if it was not collected with ``compact_obs=True``.
        ValueError: if it lacks the frame that follows one of its frames, because time
            was cut or reordered.
    """
    stores = list(_stores(batch))
    if not stores:
        following = batch.get("next").keys(include_nested=True)
        if any("observation" in key for key in following if isinstance(key, tuple)):
            return batch  # Restored, or the policy changes all observations.
        raise KeyError(
            f"The batch has neither next observations nor {'/'.join(KEY)}: it was not "
            "collected with compact_obs=True."
        )
    ids = _ids(batch)
    known, order = torch.cat([store.ids for store in stores]).to(ids.device).sort()
    nearest = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    is_last = known[nearest] == ids
    is_padding = ids == 0
    _check_complete(ids, is_last | is_padding)
    stored = order[nearest[is_last]]
    for key in stores[0].observations:
        root = batch.get(key, None)
        if root is None:  # The user has removed it.
            continue
        values = torch.cat([store.observations[key] for store in stores])
        leaves = root.reshape(*ids.shape, *root.shape[batch.ndim :])
        following = torch.empty_like(leaves)
        following[:, :-1] = leaves[:, 1:]
        filled = indexable(following)
        filled[is_last] = indexable(values).to(root.device)[stored]
        filled[is_padding] = 0
        batch.set(("next", *key), following.reshape(root.shape))
    collector = batch.get("collector")
    for name in (KEY[1], FRAME_IDS[1]):
        del collector[name]
    if collector.is_empty():
        del batch["collector"]
    return batch


def _ids(batch: TensorDictBase) -> torch.Tensor:
    """Return the ids of a batch as ``[rows, frames]``."""
    ids = batch.get(FRAME_IDS, None)
    if ids is None:
        raise ValueError(
            f"The batch has no {'/'.join(FRAME_IDS)}, which number its frames: call "
            "restore_next(batch) before you remove them."
        )
    if ids.is_nested:
        raise ValueError(
            "restore_next(batch) needs ordinary or padded tensors: call it before you "
            "split the batch into nested tensors."
        )
    frames = ids.shape[-1] if ids.ndim else 1
    return ids.reshape(ids.numel() // max(frames, 1), frames).contiguous()


def _check_complete(ids: torch.Tensor, needs_none: torch.Tensor) -> None:
    """Check that each frame is followed by the right one.

    Args:
        ids: ``[rows, frames]``.
        needs_none: for which frames this is not needed.

    Raises:
        ValueError: if one is missing.
    """
    lost = ~needs_none
    lost[:, :-1] &= ids[:, 1:] != ids[:, :-1] + 1
    if lost.any():
        row, frame = lost.nonzero()[0].tolist()
        raise ValueError(
            f"{int(lost.sum())} frames have lost the frame that followed them, first "
            f"frame {frame} of row {row}, so their next observations are unknown. Call "
            "restore_next(batch) before you cut, select or reorder frames in time. "
            "Whole rows may be selected, reordered and joined."
        )


def _stores(batch: TensorDictBase) -> Iterator[LastObservations]:
    """Yield the last observations of all batches that were joined to this one."""
    collector: Any = batch.get("collector", None)
    if collector is None or KEY[1] not in collector.keys():
        return
    seen: set[int] = set()
    pending = [collector.get_non_tensor(KEY[1])]
    while pending:
        entry = pending.pop()
        if isinstance(entry, list):  # Nested lists ``[*B, T]``.
            pending += entry
        elif entry is not None and id(entry) not in seen:
            seen.add(id(entry))
            yield entry
