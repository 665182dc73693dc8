"""The frames of a dataset in libraries of compressed columns.

The frames are those of ``vectors``: simple_spread, of random actions. A library stores
every key, also next observations, as a column of chunks of 500 frames; Arrow has chunks
of a batch. Libraries read ascending numbers without repetition, which they prefer. What
is read is in the page cache, and every file was opened before. Processor time is that
of all threads.

A batch of 2,000 frames is appended and synced to the disk. HDF5, zarr and blosc2 have
no transaction over several columns. Sizes are of 20,000 frames.
"""

import functools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness.turns import Alternative
from numpy.typing import NDArray

from cases.case import Case
from cases.datasets import folder, size
from cases.vectors import BATCH, add_again, batch, collected, dataset
from marl_collect.core.tensordicts import flatten
from marl_collect.files.atomic import sync
from marl_collect.storage import Writer
from marl_collect.storage.files import sync_tree

COUNTS = (20_000, 1_000_000)
CHUNK = 500
"""Frames of a chunk."""
SHARD = 100_000
"""Frames of a file, where a library has several chunks in one."""
SAMPLE = 256
Columns = dict[str, NDArray[Any]]
"""Each key: ``[frames, ...]``."""


def columns(number: int) -> Columns:
    """Return the frames of one batch."""
    tensors = flatten(batch(number)[0])
    return {"/".join(key): tensor.numpy() for key, tensor in tensors.items()}


class Library(Protocol):
    """Columns that grow, in a file or folder."""

    def append(self, values: Columns) -> None:
        """Write frames behind the others, and wait for the disk."""

    def read(self, numbers: NDArray[np.int64]) -> object:
        """Read frames, ascending."""


class Hdf5:
    """h5py; rows are read one by one, because it is slower with a list."""

    def __init__(self, path: Path, first: Columns, *, compression: str) -> None:
        """Create the columns of a batch, without frames."""
        import h5py

        self._path = path
        self._file = h5py.File(path, "w", libver="latest")
        self._arrays = {
            name: self._file.create_dataset(
                name,
                (0, *value.shape[1:]),
                value.dtype,
                maxshape=(None, *value.shape[1:]),
                chunks=(CHUNK, *value.shape[1:]),
                compression=compression,
                shuffle=True,
            )
            for name, value in first.items()
        }

    def append(self, values: Columns) -> None:
        """Write frames behind the others, and wait for the disk."""
        for name, value in values.items():
            array = self._arrays[name]
            end = len(array)
            array.resize(end + len(value), 0)
            array[end:] = value
        self._file.flush()
        sync(self._path, os.O_RDWR)

    def read(self, numbers: NDArray[np.int64]) -> object:
        """Read frames, ascending."""
        arrays = self._arrays.values()
        return [np.stack([array[row] for row in numbers]) for array in arrays]


class Arrow:
    """A stream of Arrow's record batches: its files cannot be appended to.

    Batches that are not compressed are used where they are mapped. Of others, those
    with a frame of the sample are decoded.
    """

    def __init__(self, path: Path, first: Columns, *, compression: str | None) -> None:
        """Create the columns of a batch, without frames."""
        import pyarrow

        self._arrow = pyarrow
        self._path = path
        self._kinds = {name: (v.dtype, v.shape[1:]) for name, v in first.items()}
        self._schema = pyarrow.schema(
            [(name, pyarrow.binary(value[0].nbytes)) for name, value in first.items()]
        )
        self._compression = compression
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        self._file = path.open("wb")
        self._stream = pyarrow.ipc.new_stream(self._file, self._schema, options=options)
        self._begins: list[int] = []  # Of the batches; a stream does not list them.
        self._table: Any = None

    def append(self, values: Columns) -> None:
        """Write frames behind the others, and wait for the disk."""
        of = self._arrow.FixedSizeBinaryArray.from_buffers
        arrays = [
            of(field.type, len(value), [None, self._arrow.py_buffer(value)])
            for field, value in zip(self._schema, values.values(), strict=True)
        ]
        self._begins.append(self._file.tell())
        self._stream.write(self._arrow.record_batch(arrays, schema=self._schema))
        self._file.flush()
        sync(self._path, os.O_RDWR)

    def read(self, numbers: NDArray[np.int64]) -> object:
        """Read frames, ascending."""
        rows = self._decode(numbers) if self._compression else self._take(numbers)
        values = {}
        for name, (dtype, shape) in self._kinds.items():
            buffer = rows.column(name).combine_chunks().buffers()[1]
            values[name] = np.frombuffer(buffer, dtype).reshape(-1, *shape).copy()
        return values

    def _take(self, numbers: NDArray[np.int64]) -> Any:
        if self._table is None:
            mapped = self._arrow.memory_map(str(self._path))
            self._table = self._arrow.ipc.open_stream(mapped).read_all()
        return self._table.take(numbers)

    def _decode(self, numbers: NDArray[np.int64]) -> Any:
        mapped = self._arrow.memory_map(str(self._path))
        of, rows = np.divmod(numbers, BATCH)
        batches = []
        for number in np.unique(of):
            mapped.seek(self._begins[number])
            message = self._arrow.ipc.read_message(mapped)
            if message.type == "schema":  # It is in front of the first batch.
                message = self._arrow.ipc.read_message(mapped)
            record_batch = self._arrow.ipc.read_record_batch(message, self._schema)
            batches.append(record_batch.take(self._arrow.array(rows[of == number])))
        return self._arrow.Table.from_batches(batches)


class TensorStore:
    """zarr 3 with shards, through tensorstore, which reads columns in threads."""

    def __init__(self, path: Path, first: Columns) -> None:
        """Create the columns of a batch, without frames."""
        import tensorstore

        self._count = 0
        self._arrays = {
            name: tensorstore.open(
                {
                    "driver": "zarr3",
                    "kvstore": f"file://{path}/{name}/",
                    "metadata": _zarr_metadata(value),
                },
                create=True,
                dtype=value.dtype,
                shape=[0, *value.shape[1:]],
            ).result()
            for name, value in first.items()
        }

    def append(self, values: Columns) -> None:
        """Write frames behind the others, and wait for the disk."""
        begin = self._count
        self._count += len(next(iter(values.values())))
        writes = []
        for name, value in values.items():
            size = [self._count, *value.shape[1:]]
            array = self._arrays[name].resize(exclusive_max=size).result()
            self._arrays[name] = array
            writes.append(array[begin : self._count].write(value))
        for write in writes:
            write.result()  # It syncs its files.

    def read(self, numbers: NDArray[np.int64]) -> object:
        """Read frames, ascending."""
        reads = [array[numbers].read() for array in self._arrays.values()]
        return [future.result() for future in reads]


def _zarr_metadata(value: NDArray[Any]) -> dict[str, Any]:
    """Return the same codecs that zarr's package chooses for shards."""
    chunk = [CHUNK, *value.shape[1:]]
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 0}},
    ]
    sharding = {"chunk_shape": chunk, "codecs": codecs}
    grid = {"chunk_shape": [SHARD, *chunk[1:]]}
    return {
        "chunk_grid": {"name": "regular", "configuration": grid},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


class Zarr:
    """zarr 3 with shards, through zarr's own package."""

    def __init__(self, path: Path, first: Columns) -> None:
        """Create the columns of a batch, without frames."""
        import zarr  # type: ignore[import-not-found,unused-ignore]

        self._path = path
        group = zarr.create_group(str(path))
        self._arrays = {
            name: group.create_array(
                name,
                shape=(0, *value.shape[1:]),
                dtype=value.dtype,
                chunks=(CHUNK, *value.shape[1:]),
                shards=(SHARD, *value.shape[1:]),
            )
            for name, value in first.items()
        }

    def append(self, values: Columns) -> None:
        """Write frames behind the others, and wait for the disk."""
        for name, value in values.items():
            self._arrays[name].append(value)
        sync_tree(self._path)

    def read(self, numbers: NDArray[np.int64]) -> object:
        """Read frames, ascending."""
        return [array.oindex[numbers] for array in self._arrays.values()]


class Blosc2:
    """blosc2, one file for each column."""

    def __init__(self, path: Path, _first: Columns) -> None:
        """Create the folder; the first batch creates the columns."""
        import blosc2  # type: ignore[import-not-found,import-untyped,unused-ignore]

        self._blosc2 = blosc2
        self._path = path
        path.mkdir()
        self._arrays: dict[str, Any] = {}

    def append(self, values: Columns) -> None:
        """Write frames behind the others, and wait for the disk."""
        for name, value in values.items():
            array = self._arrays.get(name)
            if array is None:  # An array without frames cannot be resized.
                file = str(self._path / name.replace("/", "."))
                chunk = (CHUNK, *value.shape[1:])
                self._arrays[name] = self._blosc2.asarray(
                    value, urlpath=file, chunks=chunk
                )
                continue
            end = len(array)
            array.resize((end + len(value), *value.shape[1:]))
            array[end:] = value
        sync_tree(self._path)

    def read(self, numbers: NDArray[np.int64]) -> object:
        """Read frames, ascending."""
        return [array[numbers] for array in self._arrays.values()]


LIBRARIES: dict[str, Callable[[Path, Columns], Library]] = {
    "h5py, lzf": partial(Hdf5, compression="lzf"),
    "h5py, gzip": partial(Hdf5, compression="gzip"),
    "Arrow stream": partial(Arrow, compression=None),
    "Arrow stream, zstd": partial(Arrow, compression="zstd"),
    "zarr 3 shards, tensorstore": TensorStore,
    "zarr 3 shards, zarr": Zarr,
    "blosc2": Blosc2,
}


@functools.cache
def written(name: str, frames: int) -> Library:
    """Return a library with the frames of the dataset, written once."""
    path = folder() / f"{name}, {frames}"
    library = LIBRARIES[name](path, columns(0))
    per_write = min(frames, SHARD) // BATCH
    for first in range(0, frames // BATCH, per_write):
        # A shard that is written in parts is rewritten for each.
        chunks = [columns(first + number) for number in range(per_write)]
        if isinstance(library, Arrow):
            for chunk in chunks:
                library.append(chunk)
        else:
            library.append(
                {
                    key: np.concatenate([chunk[key] for chunk in chunks])
                    for key in chunks[0]
                }
            )
    return library


def sampling(_: ExitStack, name: str, frames: int) -> dict[str, Alternative]:
    """Return the reading of random frames."""
    library, transitions = written(name, frames), dataset(frames).transitions
    transitions[:: BATCH // 2]  # Reads and checks all batches.
    rng = np.random.default_rng(0)

    def numbers() -> NDArray[np.int64]:
        return np.unique(rng.integers(frames, size=SAMPLE))

    return {
        "dataset": Alternative.once(lambda: transitions[numbers()]),
        name: Alternative.once(lambda: library.read(numbers())),
    }


def appending(stack: ExitStack, name: str) -> dict[str, Alternative]:
    """Return the appending of a batch to 20,000 frames, and the size of those."""
    library = written(name, COUNTS[0])
    library_size = size(folder() / f"{name}, {COUNTS[0]}")
    path = dataset(COUNTS[0]).path
    dataset_size = size(path)
    copy = folder() / f"{name}, appended"
    writer = stack.enter_context(Writer(copy, collected()[0]))
    first_batch, values = batch(0), columns(0)
    return {
        "dataset": Alternative(
            Alternative.once(partial(add_again, writer, first_batch)).call,
            nbytes=lambda: dataset_size,
        ),
        name: Alternative(
            Alternative.once(lambda: library.append(values)).call,
            nbytes=lambda: library_size,
        ),
    }


def cases() -> list[Case]:
    """Return the rows: one of each library, so that one may be missing."""
    rows = []
    for name in LIBRARIES:
        rows += [
            Case(
                f"256 of {frames:,} frames, {name}",
                partial(sampling, name=name, frames=frames),
                per="ms",
            )
            for frames in COUNTS
        ]
        rows.append(
            Case(
                f"append, {name}",
                partial(appending, name=name),
                "batch",
                "ms",
                clock=time.perf_counter,
            )
        )
    return rows
