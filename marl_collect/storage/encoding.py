"""Encodes a batch as one range of bytes, and reads the tables in it.

See ``docs/storage_format.md`` for the order of its parts.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.episodes import EpisodeTable
from marl_collect.storage.index import (
    RECORDS,
    TAIL,
    BatchEntry,
    Index,
    KeyField,
    Layout,
    root_of,
)
from marl_collect.storage.packed import (
    PACKED_FROM,
    RECORDS_FROM,
    compressed_share,
    pack,
)
from marl_collect.storage.records import Bytes, RecordLayout
from marl_collect.storage.statistics import Range

_MOSTLY: Final = 0.5
"""The root value of the following frame is used if it is right for this share of
frames, and records are packed if that reduces them to this share."""


def choose_layout(
    keys: Sequence[KeyField], tensors: Mapping[Key, torch.Tensor]
) -> Layout:
    """Decide by the first batch how each key is stored."""
    packed: list[Key] = []
    follows: list[Key] = []
    for item in keys:
        key, root = item.key, root_of(item, keys)
        if item.nbytes >= PACKED_FROM:
            packed.append(key)
        elif root is not None:
            equal = repeats(tensors[key], tensors[root])[:, :-1]
            if not equal.size or equal.mean() >= _MOSTLY:
                follows.append(key)
    return Layout(keys, packed, follows)


def encode(
    index: Index,
    layout: Layout,
    tensors: Mapping[Key, torch.Tensor],
    valid: Sequence[int],
    episodes: EpisodeTable,
    compression: str,
) -> tuple[BatchEntry, list[Any]]:
    """Encode a batch; segment and offset of the entry are 0.

    Args:
        index: with the keys of the batch and its run.
        layout: of the batch before, or the chosen one.
        tensors: of the batch, each ``[B, T, ...]``.
        valid: number of valid frames of each row.
        episodes: which ended in the batch.
        compression: of packed frames.

    Returns:
        The entry, whose layout is a new one if that of the batch before does not fit,
        and the bytes, in parts.
    """
    shape = next(iter(tensors.values())).shape[:2]
    count = shape[0] * shape[1]
    rows = {key: frame_bytes(tensor) for key, tensor in tensors.items()}
    following = np.zeros(shape, np.bool_)
    following[:, :-1] = bool(layout.follows)
    for key in layout.follows:
        following &= repeats(tensors[key], tensors[key[1:]])
    follows = following.reshape(-1)
    records = np.empty((count, layout.record_size), np.uint8)
    stored = np.flatnonzero(~follows) if layout.follows else np.empty(0, np.int64)
    number = np.zeros(count, "<u4")
    number[stored] = np.arange(1, len(stored) + 1)
    records[:, :TAIL] = number.view(np.uint8).reshape(count, TAIL)
    for key, (begin, end) in layout.records.items():
        records[:, begin:end] = rows[key]
    tails = np.empty((len(stored), layout.tail_size), np.uint8)
    for key, (begin, end) in layout.tails.items():
        tails[:, begin:end] = rows[key][stored]
    is_new = layout.is_new
    layout = layout.fitting(
        RecordLayout.of(records),
        # Without a tail, what a tail would have is not known.
        RecordLayout.of(
            tails if len(tails) else np.zeros((1, layout.tail_size), np.uint8)
        ),
    )
    encoded = layout.record.encode(records)
    if (
        is_new
        and encoded.shape[1] >= RECORDS_FROM
        and compressed_share(encoded, compression) <= _MOSTLY
    ):
        layout = layout.packing_records()
    rows[RECORDS] = encoded
    tables, frames, packed = [], [], []
    for key in layout.packed:
        shared = np.zeros(shape, np.bool_)
        if key[:1] == ("next",) and key[1:] in layout.packed:
            shared = repeats(tensors[key], tensors[key[1:]])
        codec, table, blobs = pack(rows[key], shared.reshape(-1), compression)
        tables.append(table)
        frames += blobs
        packed.append((codec, sum(map(len, blobs))))
    ranges = [range_of(tensors[item.key], valid).to_json() for item in index.keys]
    text = json.dumps(ranges, allow_nan=False).encode()
    notes = zlib.compress(episodes.to_bytes() + text)
    head = [
        b"" if RECORDS in layout.packed else encoded.tobytes(),
        layout.tail.encode(tails).tobytes(),
        *tables,
        notes,
    ]
    checksum = 0
    for part in head:
        checksum = zlib.crc32(part, checksum)
    entry = BatchEntry(
        len(index.runs) - 1,
        (shape[0], shape[1]),
        sum(valid),
        len(episodes),
        int(episodes.length.sum()),
        {name: tuple(r.sum(0).tolist()) for name, r in episodes.returns.items()},
        layout,
        segment=0,
        offset=0,
        tails=len(stored),
        packed=tuple(packed),
        notes=len(notes),
        checksum=checksum,
    )
    return entry, [*head, *frames]


def frame_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes ``[B * T, n]`` of a tensor ``[B, T, ...]``."""
    tensor = tensor.detach().cpu().contiguous()
    count = tensor.shape[0] * tensor.shape[1]
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(count, -1)


def repeats(after: torch.Tensor, root: torch.Tensor) -> NDArray[np.bool_]:
    """Return ``[B, T]``, where ``after`` is bit by bit ``root`` of the next frame."""
    size, length = after.shape[:2]
    stored, repeated = (
        frame_bytes(tensor).reshape(size, length, tensor[0, 0].nbytes)
        for tensor in (after, root)
    )
    equal = np.zeros((size, length), np.bool_)
    equal[:, :-1] = (stored[:, :-1] == repeated[:, 1:]).all(-1)
    return equal


def range_of(tensor: torch.Tensor, frames: Sequence[int]) -> Range:
    """Return the range of a tensor ``[B, T, ...]``.

    Args:
        tensor: of one key of a batch, of all agents.
        frames: number of valid frames of each row; they are the first ones.
    """
    if tensor.is_complex():  # Complex numbers have no order.
        return Range()
    if any(count < tensor.shape[1] for count in frames):
        rows = zip(tensor, frames, strict=True)
        tensor = torch.cat([row[:count] for row, count in rows])
    if not tensor.numel():
        return Range()
    if tensor.is_floating_point() and tensor.dtype not in (
        torch.float32,
        torch.float64,
        torch.float16,
    ):
        tensor = tensor.float()  # NumPy has no bfloat16.
    # NumPy takes no threads from the processes that collect.
    values: Any = tensor.detach().cpu().numpy()
    with np.errstate(invalid="ignore"):
        low, high = values.min(), values.max()
    nans = 0
    if low != low:  # noqa: PLR0124 - NaN
        missing = np.isnan(values)
        nans = int(missing.sum())
        if nans == values.size:
            return Range(nans=nans)
        known = values[~missing]
        low, high = known.min(), known.max()
    if values.dtype == np.bool_:
        return Range(int(low), int(high))
    return Range(low.item(), high.item(), nans)
