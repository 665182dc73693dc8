"""Exports episodes to one HDF5 file, and imports it.

Whole episodes are stored back to back. An array ``[sum of lengths, ...]`` in
``frames`` has the values of one key. Where a key exists at the root and under ``next``,
the next value of a frame is the root value of the following one, so ``frames/next`` has
only the others: those of each episode's last frame. ``stored`` lists their frames if
there are more. ``episodes`` has length, run and seed of each episode.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.checks import DatasetError, naming
from marl_collect.storage.formats.blocks import (
    Block,
    Rows,
    cuts,
    header_from_json,
    header_to_json,
)
from marl_collect.storage.formats.registry import Format, Source
from marl_collect.storage.index import Index, KeyField
from marl_collect.storage.packed import check_compression

_FORMAT: Final = "marl_collect episodes"
_VERSION: Final = 1
COMPRESSIONS: Final = ("gzip", "lzf", "none")
"""Of the arrays in HDF5 files."""
_CHUNK: Final = 2**18
"""Bytes of a chunk, unless a single frame is larger."""
_NO_SEED: Final = -1
_UNSAFE: Final = re.compile(r'[/<>:"|?*\\ %\x00-\x1f\x7f]')


def _export(
    path: Path,
    contents: Index,
    blocks: Iterator[Block],
    target: Path,
    *,
    compression: str = "gzip",
) -> None:
    del target
    check_compression(compression, COMPRESSIONS)
    import h5py

    filters: dict[str, Any] = {"fletcher32": True}  # Detects damage.
    if compression != "none":
        filters |= {"shuffle": True, "compression": compression}
    with h5py.File(path, "w", libver="latest") as file:
        file.attrs["format"], file.attrs["version"] = _FORMAT, _VERSION
        file["header"] = json.dumps(header_to_json(contents))
        arrays = {
            field.key: _create(
                file, contents, field, filters, grows=field.key in contents.roots
            )
            for field in contents.keys
        }
        stored: dict[Key, list[NDArray[np.int64]]] = {k: [] for k in contents.roots}
        episodes: list[tuple[int, int, int]] = []
        begin = 0
        for block in blocks:
            end = begin + sum(block.lengths)
            for field, values, rows in block.stored(contents):
                array = arrays[field.key]
                if rows is None:
                    array[begin:end] = values
                    continue
                size = len(array)
                array.resize(size + len(rows), axis=0)
                array[size:] = values
                stored[field.key].append(rows + begin)
            seeds = [_NO_SEED if n is None else n for n in block.seeds]
            runs = [block.run] * len(seeds)
            episodes += zip(block.lengths, runs, seeds, strict=True)
            begin = end
        lengths, all_runs, all_seeds = np.array(episodes, np.int64).T
        for key, parts in stored.items():
            rows = np.concatenate(parts)
            if not np.array_equal(rows, np.cumsum(lengths) - 1):
                file.create_dataset(_name_of("stored", key), data=rows, **filters)
        file.create_dataset("episodes/length", data=lengths, **filters)
        file.create_dataset("episodes/run", data=all_runs, **filters)
        file.create_dataset("episodes/seed", data=all_seeds, **filters)


def _create(
    file: Any, contents: Index, field: KeyField, filters: dict[str, Any], *, grows: bool
) -> Any:
    """Create the array of a key; one that grows has a row per episode or more."""
    rows = contents.totals.episodes if grows else contents.totals.frames
    # One row may be an image, and thousands of rows a few bytes.
    chunk = (max(1, min(rows, _CHUNK // max(1, field.nbytes))), *field.shape)
    empty = 0 in field.shape
    return file.create_dataset(
        _name_of("frames", field.key),
        (0 if grows else rows, *field.shape),
        np.dtype(field.dtype),
        maxshape=(None, *field.shape) if grows else None,
        chunks=None if empty and not grows else chunk,
        **({} if empty else filters),
    )


def _open(file: Path) -> Source:
    import h5py

    if not h5py.is_hdf5(file):
        raise DatasetError(f"{file} is not an HDF5 file.")
    with h5py.File(file) as data:
        if data.attrs.get("format") != _FORMAT:
            raise DatasetError(
                f"{file} is an HDF5 file, but not of `marl-collect export --format "
                "hdf5`. For a dataset of Minari use the format minari and its folder."
            )
        if data.attrs.get("version") != _VERSION:
            raise DatasetError(
                f"{file} has version {data.attrs.get('version')}, but this version of "
                f"marl_collect reads version {_VERSION}. Install a newer one."
            )
        with naming(file, "a complete export"):
            contents = header_from_json(json.loads(_array(data, "header")[()]))
    return contents, _read(file, contents)


def _read(path: Path, contents: Index) -> Iterator[Block]:
    import h5py

    with h5py.File(path) as file, naming(path, "a complete export"):
        lengths, runs = (
            _array(file, f"episodes/{name}")[:] for name in ("length", "run")
        )
        stored = {
            key: _array(file, _name_of("stored", key))[:]
            if _name_of("stored", key) in file
            else np.cumsum(lengths) - 1
            for key in contents.roots
        }
        for first, last in cuts(contents, lengths, runs):
            begin = int(lengths[:first].sum())
            end = begin + int(lengths[first:last].sum())
            columns: dict[Key, tuple[NDArray[Any], Rows]] = {}
            for field in contents.keys:
                array = _array(file, _name_of("frames", field.key))
                if field.key not in stored:
                    columns[field.key] = array[begin:end], None
                    continue
                low, high = np.searchsorted(stored[field.key], (begin, end))
                rows = stored[field.key][low:high] - begin
                columns[field.key] = array[low:high], rows
            lengths_of_block = lengths[first:last].tolist()
            yield Block.restored(contents, columns, lengths_of_block, int(runs[first]))


def _array(file: Any, name: str) -> Any:
    """Return an array of the file.

    Raises:
        DatasetError: if its content is in another file, which HDF5 would read without
            asking. Exports have no such arrays.
    """
    import h5py

    array = file
    for part in name.split("/"):
        if not isinstance(array.get(part, getlink=True), h5py.HardLink):
            raise DatasetError(f"{name} is missing, or a link.")
        array = array[part]
    if array.external or array.is_virtual:
        raise DatasetError(f"{name} has its content in another file.")
    return array


def _name_of(root: str, key: Key) -> str:
    return "/".join([root, *map(encoded, key)])


def encoded(name: str) -> str:
    """Return one part of a key as a name in the file, as tensordict names files."""
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", name)


FORMAT: Final = Format(
    summary="one HDF5 file, smaller than the dataset; any tool reads it with h5py",
    extra="hdf5",
    packages=("h5py",),
    export=_export,
    open=_open,
    is_file=True,
)
