"""The keys of a frame as columns of a table, and back.

A row is one valid frame, without the padding of ragged batches. A column is named after
its key: the parts are joined by dots, with ``%2E`` and ``%25`` for dots and percent
signs within a part. Values are nested lists, so the shape is in the schema; frames of 4
KiB and more, and empty ones, are bytes. A ``next`` value is null where it equals the
value at the root of the following row, and that row is of the same trajectory.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.buffers.compact_observations import KEY as LAST
from marl_collect.buffers.compact_observations import restore_next
from marl_collect.buffers.layout import FRAME_IDS, TRAJ_IDS, VALID
from marl_collect.core.description import Key
from marl_collect.core.tensordicts import flatten
from marl_collect.errors import DatasetError
from marl_collect.options import Option, require
from marl_collect.storage.arrow import pa, pc

RUN: Final = "run"
FRAME_INDEX: Final = "frame_index"
DONE: Final = ("next", "done")
TERMINATED: Final = ("next", "terminated")
_METADATA: Final = b"marl_collect"
_VERSION: Final = 1
_DEEPEST: Final = 100
"""Parts of the longest key; TensorDicts are nested by recursion."""
_LARGE: Final = 4096
"""Bytes of a frame from which on it is stored as bytes: lists of many numbers are slow
to encode, and a reader that needs no pictures skips them."""
_VIEWS: Final = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "complex64": "int64",
}
"""Dtypes that Parquet lacks, by the dtype of the same size whose bytes it stores."""
_DTYPES: Final = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", *_VIEWS),
)
Rows = Mapping["Column", NDArray[Any]]
"""The frames of a batch, ``[n, *shape]`` for every column."""


@final
@dataclass(frozen=True)
class Column:
    """One key of a frame.

    Attributes:
        key: in batches.
        shape: of one frame.
        dtype: torch's name, such as ``"float32"``.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def name(self) -> str:
        """Name of the column."""
        return ".".join(p.replace("%", "%25").replace(".", "%2E") for p in self.key)

    @cached_property
    def stored(self) -> np.dtype[Any]:
        """Dtype of the stored values."""
        return np.dtype(_VIEWS.get(self.dtype, self.dtype))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one frame."""
        return prod(self.shape) * self.stored.itemsize

    @cached_property
    def is_large(self) -> bool:
        """Whether frames are stored as bytes."""
        return self.nbytes >= _LARGE or not self.nbytes

    @property
    def root(self) -> Key | None:
        """The key at the root of a key under ``next``."""
        return self.key[1:] if self.key[0] == "next" else None

    @property
    def is_reward(self) -> bool:
        """Whether it has the rewards of a step."""
        return self.key[0] == "next" and self.key[-1] == "reward"

    def tensor(self, values: NDArray[Any]) -> torch.Tensor:
        """Return stored values as a tensor of the column's dtype, without copying."""
        tensor = torch.from_numpy(values)
        return tensor.view(getattr(torch, self.dtype)) if self.is_view else tensor

    def array(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Return the stored values of a contiguous tensor, without copying."""
        stored = getattr(torch, str(self.stored))
        return (tensor.view(stored) if self.is_view else tensor).numpy()

    @property
    def is_view(self) -> bool:
        """Whether the stored values are bytes of another dtype."""
        return self.dtype in _VIEWS

    def field(self, arrow_type: pa.DataType) -> pa.Field:
        """Return the field of the table's schema."""
        about = {"key": json.dumps(self.key), "shape": json.dumps(self.shape)}
        return pa.field(self.name, arrow_type, metadata=about | {"dtype": self.dtype})

    @classmethod
    def of_field(cls, field: pa.Field) -> Self:
        """Return the column of a field; an error if it says something impossible."""
        texts = {k: v.decode(errors="replace") for k, v in field.metadata.items()}
        key, shape = json.loads(texts[b"key"]), json.loads(texts[b"shape"])
        is_key = isinstance(key, list) and 0 < len(key) <= _DEEPEST
        is_shape = isinstance(shape, list)
        if (
            not (is_key and all(isinstance(part, str) for part in key))
            or not (is_shape and all(type(n) is int and n >= 0 for n in shape))
            or texts[b"dtype"] not in _DTYPES
        ):
            raise DatasetError(f"the column {field.name} is described as {texts}.")
        column = cls(tuple(key), tuple(shape), texts[b"dtype"])
        if column.name != field.name:
            raise DatasetError(f"the column {field.name} is of the key {key!r}.")
        return column


def expanded(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch with the observations that ``compact_obs`` leaves out."""
    if LAST in batch.keys(include_nested=True):
        batch = restore_next(batch.clone(recurse=False))
    return batch


def rows_of(batch: TensorDictBase) -> Rows:
    """Return the valid frames of a batch ``[B, T]``, row by row."""
    require("batch", batch, TensorDictBase, Option(""))
    if batch.ndim != 2:
        raise ValueError(f"Expected a batch [B, T], but found {list(batch.shape)}.")
    tensors = flatten(expanded(batch))
    if TRAJ_IDS not in tensors:
        raise ValueError(
            "The batch has no ('collector', 'traj_ids') to identify episodes: collect "
            "with track_traj_ids=True."
        )
    if DONE not in tensors:
        raise ValueError(f"The batch has no {DONE} to tell where episodes end.")
    valid = tensors.pop(VALID, None)
    chosen = slice(None) if valid is None else valid.reshape(-1).cpu().numpy()
    tensors.pop(FRAME_IDS, None)  # Only restore_next needs them.
    rows = {}
    for key, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        column = _column(key, tensor)
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        array = column.array(tensor).reshape(prod(batch.shape), *column.shape)
        rows[column] = array[chosen]
    if not len(next(iter(rows.values()))):
        raise ValueError("The batch has no valid frames.")
    return rows


def _column(key: Key, tensor: torch.Tensor) -> Column:
    dtype = str(tensor.dtype).removeprefix("torch.")
    column = Column(key, tuple(tensor.shape[2:]), dtype)
    if column.name in (RUN, FRAME_INDEX) or len(key) > _DEEPEST:
        raise ValueError(
            f"{key} cannot be stored: the names {RUN} and {FRAME_INDEX} are "
            f"taken, and keys have at most {_DEEPEST} parts."
        )
    if dtype not in _DTYPES:
        raise ValueError(f"{key} has the dtype {dtype}, which is not stored.")
    return column


def to_table(
    rows: Rows, run: str, frame_index: NDArray[np.int32], about: Mapping[str, Any]
) -> pa.Table:
    """Return frames of a run as a table, with JSON values for the schema."""
    (ids,) = (values for column, values in rows.items() if column.key == TRAJ_IDS)
    follows = np.append(ids[1:] == ids[:-1], False)
    arrays = [
        pa.DictionaryArray.from_arrays(np.zeros(len(ids), np.int32), [run]),
        pa.array(frame_index),
    ]
    fields = [pa.field(RUN, arrays[0].type), pa.field(FRAME_INDEX, pa.int32())]
    for column, values in rows.items():
        repeats = np.zeros(len(ids), np.bool_)
        root = rows.get(Column(column.root or (), column.shape, column.dtype))
        if root is not None:
            same = _bytes(values)[:-1] == _bytes(root)[1:]
            repeats[:-1] = follows[:-1] & same.all(1)
        arrays.append(_encode(column, values, repeats))
        fields.append(column.field(arrays[-1].type))
    metadata = {_METADATA: json.dumps({"version": _VERSION, **about}).encode()}
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata))


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """Return the columns of a file; an error if it is none of a dataset."""
    version = json_of(schema).get("version")
    if version != _VERSION:
        raise DatasetError(
            f"it has version {version!r} of the format, but this package reads version "
            f"{_VERSION}: install a newer one."
        )
    if schema.names[:2] != [RUN, FRAME_INDEX]:
        raise DatasetError(f"it lacks the columns {RUN} and {FRAME_INDEX}.")
    columns = tuple(map(Column.of_field, list(schema)[2:]))
    keys = {column.key for column in columns}
    if not {TRAJ_IDS, DONE} <= keys or len(keys) < len(columns):
        raise DatasetError("it lacks trajectory ids or flags, or has a key twice.")
    return columns


def json_of(schema: pa.Schema) -> dict[str, Any]:
    """Return the metadata of a file of a dataset."""
    about: Any = json.loads((schema.metadata or {}).get(_METADATA, b"null"))
    if not isinstance(about, dict):
        raise DatasetError("it was not written by a dataset's Writer.")
    return about


def described(columns: Iterable[Column]) -> dict[str, str]:
    """Return dtype and shape of columns as a text for each key."""
    return {str(c.key): f"{c.dtype} {list(c.shape)}" for c in columns}


def decode(
    table: pa.Table, columns: tuple[Column, ...], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], list[memoryview]]:
    """Return the frames of a table as records, and the bytes of large frames.

    A record has the number of the frame, and a field for each column: its values, or
    for large ones two int64, of which the first one is a number in the list.
    """
    names = {column.key: column.name for column in columns}
    # All sizes are compared with the described ones before memory is allocated.
    decoded = {column: _decode(table.column(column.name), column) for column in columns}
    rows = np.zeros(len(table), dtype)
    rows[FRAME_INDEX] = table.column(FRAME_INDEX).to_numpy()
    large: list[memoryview] = []
    (ids,) = (values for c, (values, _) in decoded.items() if c.key == TRAJ_IDS)
    now, then = rows[FRAME_INDEX][:-1], rows[FRAME_INDEX][1:]
    # Whether the next row continues an episode. If its beginning was not seen, all are
    # -1.
    is_next = (then == now + 1) | ((then == -1) & (now == -1))
    follows = np.append((ids[1:] == ids[:-1]) & is_next, False)
    for column, (values, is_null) in sorted(
        decoded.items(), key=lambda item: item[0].root is not None
    ):
        out = rows[column.name]
        present: Any = slice(None)
        if is_null.any():
            if column.root not in names or (is_null & ~follows).any():
                raise DatasetError(f"the column {column.name} has a null too many.")
            out[:-1] = rows[names[column.root]][1:]
            present = ~is_null
        if column.is_large:
            out[present, 0] = np.arange(len(large), len(large) + len(values))
            large += values
        else:
            out[present] = values
    return rows, large


def flat_rows(values: NDArray[Any]) -> NDArray[Any]:
    """Return ``[n, ...]`` as ``[n, elements]``, also if n is 0."""
    return values.reshape(len(values), prod(values.shape[1:]))


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    flat = flat_rows(np.ascontiguousarray(values))
    return flat.view(np.uint8) if flat.size else np.zeros((len(values), 0), np.uint8)


def _encode(
    column: Column, values: NDArray[Any], is_null: NDArray[np.bool_]
) -> pa.Array:
    if not column.shape:
        return pa.array(np.ascontiguousarray(values), mask=is_null)
    present = np.ascontiguousarray(values[~is_null])
    width = column.nbytes if column.is_large else column.shape[0]
    ends = np.append(0, np.cumsum(np.where(is_null, 0, width)))
    if column.is_large:
        bits = np.packbits(~is_null, bitorder="little")
        buffers = [bits, ends, present.reshape(-1).view(np.uint8)]
        return pa.Array.from_buffers(
            pa.large_binary(), len(values), [pa.py_buffer(b) for b in buffers]
        )
    array = pa.array(present.reshape(-1))
    # The outer list is of variable length: null lists of fixed size cannot be written.
    for size in reversed(column.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return pa.LargeListArray.from_arrays(pa.array(ends), array, mask=pa.array(is_null))


def _decode(chunks: pa.ChunkedArray, column: Column) -> tuple[Any, NDArray[np.bool_]]:
    """Return the values that are not null, and which are."""
    array = pa.concat_arrays(chunks.chunks)
    is_null = ~array.is_valid().to_numpy(zero_copy_only=False)
    count = int((~is_null).sum())
    array = array.drop_null()
    expected = f"the column {column.name} holds {array.type}, expected {column}."
    if column.is_large:
        if not pa.types.is_large_binary(array.type):
            raise DatasetError(expected)
        frames = [memoryview(value.as_buffer()) for value in array]
        if any(frame.nbytes != column.nbytes for frame in frames):
            raise DatasetError(
                f"the column {column.name} has frames that are not {column.nbytes} "
                "bytes long."
            )
        return frames, is_null
    for size in column.shape:
        kind = array.type
        if not (pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise DatasetError(expected)
        if len(array) and not (pc.list_value_length(array).to_numpy() == size).all():
            raise DatasetError(
                f"the column {column.name} has other shapes than {column.shape}."
            )
        array = array.flatten()
    if array.null_count or array.type != pa.from_numpy_dtype(column.stored):
        raise DatasetError(expected)
    values = array.to_numpy(zero_copy_only=False)
    return values.reshape(count, *column.shape), is_null
