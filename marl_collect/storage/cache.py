"""Decoded frames on disk, which readers map.

The folder of a cache has files of one *generation*, a random name:

- ``G.records``: a NumPy record per frame with its number in the episode and all small
  keys, and for large ones where they begin and end in ``G.large``.
- ``G.large``: large frames, each compressed with LZ4.
- ``G.N.order.npy``, ``G.N.episodes.npy``: the frames by episode, and the complete
  episodes, of the first N frames.
- ``state.json``: what is complete. Everything behind it is rubbish of a killed process.

Files that were added behind the others are appended. If others were added, removed or
replaced, a new generation is written: what readers have mapped never changes.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.core.description import Key
from marl_collect.errors import DatasetError
from marl_collect.files.atomic import sync, write_atomically
from marl_collect.processes.cgroups import free_memory
from marl_collect.storage.arrow import pa
from marl_collect.storage.columns import (
    DONE,
    FRAME_INDEX,
    RUN,
    TERMINATED,
    Column,
    columns_of,
    decode,
    described,
    flat_rows,
)
from marl_collect.storage.description import difference
from marl_collect.storage.files import BatchFile, naming, read_about, read_table

_FORMAT: Final = 5
_PAGE: Final = mmap.PAGESIZE
_STATE: Final = "state.json"
_LZ4: Final = pa.Codec("lz4_raw")


@final
@dataclass
class CacheState:
    """What is complete in a cache.

    Attributes:
        dtype: of a record, as text.
        generation: beginning of the names of its files.
        runs: number of frames of each run by name, in the order of their numbers.
        parts: run, last batch, and time in nanoseconds of each file, as it was decoded.
            A file of joined batches stands for several.
        frames: number of records.
        large_bytes: of the large frames.
        version: of this layout.
    """

    dtype: str
    generation: str = field(default_factory=lambda: secrets.token_hex(8))
    runs: dict[str, int] = field(default_factory=dict)
    parts: list[list[Any]] = field(default_factory=list)
    frames: int = 0
    large_bytes: int = 0
    version: int = _FORMAT

    @classmethod
    def read(cls, folder: Path, dtype: np.dtype[Any]) -> Self:
        """Return the state of a cache of such records; a new one if it lacks a file."""
        with suppress(OSError, ValueError, TypeError, AttributeError):
            state = cls(**json.loads((folder / _STATE).read_text()))
            if (
                (state.dtype, state.version) == (str(dtype), _FORMAT)
                and sum(state.runs.values()) == state.frames
                and all(
                    (folder / name).stat().st_size >= size
                    for name, size in state.sizes(dtype).items()
                )
            ):
                return state
        return cls(str(dtype))

    def known(self, files: Sequence[BatchFile]) -> int | None:
        """Return how many of the files it has; None if they do not begin like it."""
        parts = iter(self.parts)
        for count, file in enumerate(files):
            part = next(parts, None)
            if part is None:
                return count
            # A file of joined batches stands for several parts.
            while part is not None and part[0] == file.run and part[1] < file.last:
                part = next(parts, None)
            if part != file.part():
                return None
        return len(files) if next(parts, None) is None else None

    def sizes(self, dtype: np.dtype[Any]) -> dict[str, int]:
        """Return the names of its files, and how long each is at least."""
        name, frames = self.generation, self.frames
        return {
            f"{name}.records": frames * dtype.itemsize,
            f"{name}.large": self.large_bytes,
            f"{name}.{frames}.order.npy": 0,
            f"{name}.{frames}.episodes.npy": 0,
        }


@final
@dataclass(frozen=True)
class Cache:
    """The decoded frames of files, complete and mapped.

    Attributes:
        columns: of the dataset.
        records: one per frame, mapped.
        large: bytes of large frames, mapped.
        order: ``[frames]``, numbers of all frames, those of an episode back to back.
        episodes: of every complete episode the position of its ``first`` frame in
            ``order``, its ``length``, ``traj_id``, number of its ``run``, whether it
            ``terminated``, and the sum of every reward, by column. In the order of
            their last frames.
        folder: of the cache.
        state: what it holds.
    """

    columns: tuple[Column, ...]
    records: NDArray[Any]
    large: NDArray[np.uint8]
    order: NDArray[np.int64]
    episodes: NDArray[Any]
    folder: Path
    state: CacheState

    @cached_property
    def _rows(self) -> dict[Key, torch.Tensor]:
        """Every small key: views of the records, ``[frames, elements]``.

        ``index_select`` copies rows of these as a whole. With more dimensions it takes
        twice as long, and indexing four times: they copy element by element.
        """
        return {
            c.key: c.tensor(self.records[c.name]).view(len(self.records), -1)
            for c in self.columns
            if not c.is_large
        }

    @cached_property
    def _scarce(self) -> mmap.mmap | None:
        """The mapping of the records if these do not fit into memory.

        Then the kernel must not read what surrounds a frame: that would be megabytes.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
        limit = free_memory()
        memory = memory if limit is None else min(memory, limit)
        if self.records.nbytes <= memory / 2:
            return None
        mapping: mmap.mmap = self.records._mmap  # type: ignore[attr-defined] # noqa: SLF001
        mapping.madvise(mmap.MADV_RANDOM)
        return mapping

    def read(
        self, numbers: NDArray[np.int64], columns: Sequence[Column]
    ) -> dict[Key, torch.Tensor]:
        """Copy frames: each column ``[n, ...]``."""
        if self._scarce is not None:  # Ask for the pages of all frames at once.
            size = self.records.dtype.itemsize
            for number in np.unique(numbers).tolist():
                begin = number * size // _PAGE * _PAGE
                end = (number + 1) * size
                self._scarce.madvise(mmap.MADV_WILLNEED, begin, end - begin)
        index = torch.from_numpy(np.ascontiguousarray(numbers))
        return {
            c.key: self._large(c, numbers)
            if c.is_large
            else self._rows[c.key].index_select(0, index).view(-1, *c.shape)
            for c in columns
        }

    def _large(self, column: Column, numbers: NDArray[np.int64]) -> torch.Tensor:
        out = np.empty((len(numbers), *column.shape), column.stored)
        spans = self.records[column.name][numbers]
        rows: dict[tuple[int, int], int] = {}
        for row, span in enumerate(map(tuple, spans.tolist())):
            # A frame is often read as the next one of the frame before it, too.
            first = rows.setdefault(span, row)
            if first == row:
                self.large_frame(span, out[row])
            else:
                out[row] = out[first]
        return column.tensor(out)

    def verify(self, files: Sequence[BatchFile]) -> None:
        """Decode its files again, and compare; see ``Dataset.verify``."""
        # As it is now: the episodes were read when it was opened.
        on_disk = _mapped(self.folder, self.state, self.columns)
        runs: dict[str, int] = {}
        behind = 0
        for file in files:
            rows, large = _decoded(file, self.columns, runs)
            stored = on_disk.records[behind : behind + len(rows)]
            behind += len(rows)
            small = [FRAME_INDEX, *(c.name for c in self.columns if not c.is_large)]
            same = all(stored[n].tobytes() == rows[n].tobytes() for n in small)
            for column in (c for c in self.columns if c.is_large):
                numbers = rows[column.name][: len(stored), :1]
                pairs = np.unique(np.c_[stored[column.name], numbers], axis=0)
                out = np.empty(column.shape, column.stored)
                for *span, number in pairs.tolist():
                    on_disk.large_frame(span, out)
                    same &= out.tobytes() == bytes(large[number])
            if not same:
                raise self._differs(file.path)
        order, episodes = _episodes(self.columns, on_disk.records, self.state.runs)
        same = (
            runs == self.state.runs
            and np.array_equal(order, on_disk.order)
            and episodes.dtype == on_disk.episodes.dtype
            and episodes.tobytes() == on_disk.episodes.tobytes()
        )
        if not same:
            raise self._differs(files[0].path.parent)

    def _differs(self, path: Path) -> DatasetError:
        return DatasetError(
            f"The cache {self.folder} differs from {path}: delete the folder of the "
            "cache."
        )

    def __reduce__(self) -> Any:
        """Map the files again in another process, instead of copying them there."""
        return _mapped, (self.folder, self.state, self.columns)

    def large_frame(self, span: Sequence[int], out: NDArray[Any]) -> None:
        """Decompress the large frame at ``span``, where it begins and ends."""
        begin, end = span
        if not out.nbytes:
            return
        try:
            part = self.large[begin:end].data
            data = _LZ4.decompress(part, out.nbytes, asbytes=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(self.folder, error) from error
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)


def _damaged(folder: Path, error: Exception) -> DatasetError:
    return DatasetError(f"The cache {folder} is damaged: {error}. Delete this folder.")


def cache_folder(folders: Sequence[Path], home: Path, *, prefer_home: bool) -> Path:
    """Return where the cache of one or several folders is.

    It is in the only folder if that can be written, else in ``home``, a folder for
    caches.
    """
    inside = folders[0] / ".cache"
    parent = inside if inside.exists() else folders[0]
    is_writable = len(folders) == 1 and os.access(parent, os.W_OK | os.X_OK)
    if is_writable and not prefer_home:
        return inside
    names = b"\0".join(os.fsencode(folder.resolve()) for folder in folders)
    return home / hashlib.sha256(names).hexdigest()[:24]


def user_cache() -> Path:
    """Return the folder of the user's caches."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "marl_collect"


def open_cache(
    list_all: Callable[[], list[BatchFile]], folder: Path
) -> tuple[list[BatchFile], Cache]:
    """Bring the cache in ``folder`` up to date, map it, and return the files it has.

    A FileNotFoundError is one of a file that has vanished; a writer may have joined it.
    """
    files = list_all()
    columns, _ = read_about(files[0].path)
    dtype = _record(columns)
    state = CacheState.read(folder, dtype)
    if state.known(files) != len(files):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another reader may have done it, also with files that are newer.
                files = list_all()
                state = CacheState.read(folder, dtype)
                if state.known(files) != len(files):
                    state = _build(folder, columns, state, files)
        except OSError as error:
            is_of_dataset = isinstance(error, FileNotFoundError)
            if is_of_dataset or error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # NumPy's errors of a full disk have a text only.
            raise type(error)(
                error.errno or errno.EIO,
                f"The cache of the dataset cannot be written ({error.strerror or error}"
                "): pass cache=, a folder with free space that may be written to",
                str(folder),
            ) from error
    return files, _mapped(folder, state, columns)


def _record(columns: Sequence[Column]) -> np.dtype[Any]:
    entries: list[Any] = [
        (c.name, "<i8", (2,)) if c.is_large else (c.name, c.stored, c.shape)
        for c in columns
    ]
    entries.append((FRAME_INDEX, "<i4"))
    # Large items first: no item crosses more cache lines than it must.
    entries.sort(key=lambda entry: -np.dtype(entry[1]).itemsize)
    return np.dtype(entries, align=True)


def _build(
    folder: Path,
    columns: tuple[Column, ...],
    state: CacheState,
    files: Sequence[BatchFile],
) -> CacheState:
    """Append what is new to the cache, or write a new generation; needs its lock.

    What the published state does not name is deleted: rubbish of killed builders
    before, and afterwards the old generation, or the new one if this fails.
    """
    dtype = _record(columns)
    _clean(folder, dtype)
    try:
        count = state.known(files)
        if count is None:
            state, count = CacheState(str(dtype)), 0
        name = state.generation
        with (
            (folder / f"{name}.records").open("ab") as records,
            (folder / f"{name}.large").open("ab") as large,
        ):
            records.truncate(state.frames * dtype.itemsize)
            large.truncate(state.large_bytes)
            for file in files[count:]:
                state.parts.append(file.part())
                rows, frames = _decoded(file, columns, state.runs)
                ends = [state.large_bytes]
                for frame in frames:
                    size = 0
                    if frame.nbytes:
                        size = large.write(_LZ4.compress(frame, asbytes=False))
                    ends.append(ends[-1] + size)
                spans = np.array([ends[:-1], ends[1:]], np.int64).T
                for column in columns:
                    if column.is_large:
                        rows[column.name] = spans[rows[column.name][:, 0]]
                records.write(rows.view(np.uint8).data)
                state.frames += len(rows)
                state.large_bytes = ends[-1]
        rows = _map(folder / f"{name}.records", dtype, state.frames)
        order, episodes = _episodes(columns, rows, state.runs)
        np.save(folder / f"{name}.{state.frames}.order.npy", order)
        np.save(folder / f"{name}.{state.frames}.episodes.npy", episodes)
        for current in state.sizes(dtype):
            sync(folder / current, os.O_RDWR)
        write_atomically(folder / _STATE, json.dumps(asdict(state)))
        return state
    finally:
        _clean(folder, dtype)


def _decoded(
    file: BatchFile, columns: tuple[Column, ...], runs: dict[str, int]
) -> tuple[NDArray[Any], list[memoryview]]:
    """Return the records and large frames of a file, and count its run's frames."""
    table = read_table(file.path, file.path)
    with naming(file.path):
        text = difference(described(columns), described(columns_of(table.schema)))
        if text:
            raise DatasetError(f"it does not fit the other files: {text}.")
        if not len(table):
            raise DatasetError("it has no frames.")
        # Its dictionary may have names that no row has.
        names = table.column(RUN).cast(pa.string()).unique().to_pylist()
        if names != [file.run]:
            raise DatasetError(f"it has frames of the runs {names}: it was renamed.")
        rows, large = decode(table, columns, _record(columns))
    runs[file.run] = runs.get(file.run, 0) + len(rows)
    return rows, large


def _episodes(
    columns: Sequence[Column], records: NDArray[Any], runs: Mapping[str, int]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the frames by episode, and the complete episodes.

    An episode is complete if its frames are number 0, 1, 2 and so on, and the last one
    is done. This covers episodes over many batches, in any order of rows.
    """
    by_key = {c.key: c.name for c in columns}
    run = np.repeat(np.arange(len(runs)), [*runs.values()])
    ids = np.ascontiguousarray(records[by_key[TRAJ_IDS]])
    order = np.lexsort((ids, run))
    ids = ids[order]
    # Runs follow each other, so `run` is in this order as it is.
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (ids[1:] != ids[:-1]) | (run[1:] != run[:-1])
    first = np.flatnonzero(is_first)
    length = np.diff(np.append(first, len(order)))
    last = first + length - 1
    expected = np.arange(len(order)) - np.repeat(first, length)
    is_wrong = records[FRAME_INDEX][order] != expected
    is_done = flat_rows(records[by_key[DONE]][order[last]]).any(1)
    complete = is_done & ~np.logical_or.reduceat(is_wrong, first)
    rewards = [column for column in columns if column.is_reward]
    kind: list[Any] = [
        *(("first", "<i8"), ("length", "<i8"), ("traj_id", "<i8")),
        *(("run", "<i4"), ("terminated", "?")),
        *((c.name, "<f8", c.shape) for c in rewards),
    ]
    episodes = np.zeros(int(complete.sum()), kind)
    episodes["first"], episodes["length"] = first[complete], length[complete]
    episodes["traj_id"], episodes["run"] = ids[first[complete]], run[first[complete]]
    if TERMINATED in by_key:
        ends = records[by_key[TERMINATED]][order[last[complete]]]
        episodes["terminated"] = flat_rows(ends).any(1)
    for column in rewards:
        values = np.asarray(records[column.name])[order].astype(np.float64)
        episodes[column.name] = np.add.reduceat(values, first)[complete]
    # Added batches leave the numbers of episodes as they are.
    return order, episodes[np.argsort(order[last[complete]])]


def _clean(folder: Path, dtype: np.dtype[Any]) -> None:
    """Delete what the published state does not name, as far as that is possible.

    What stays only takes space: names of generations are never used again.
    """
    current = {*CacheState.read(folder, dtype).sizes(dtype), _STATE, ".lock"}
    for path in folder.iterdir():
        if path.name not in current:
            with suppress(OSError):  # A folder, or a file of another user.
                path.unlink()  # Who has mapped it keeps it.


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map the beginning of a file, which may be empty."""
    if not count:
        return np.empty(0, dtype)
    mapped: NDArray[Any] = np.memmap(path, dtype, "c", shape=(count,))
    return mapped


def _mapped(folder: Path, state: CacheState, columns: tuple[Column, ...]) -> Cache:
    """Map a complete cache, unless another process has replaced it meanwhile."""
    name, frames = state.generation, state.frames
    try:
        records = _map(folder / f"{name}.records", _record(columns), frames)
        large = _map(folder / f"{name}.large", np.dtype(np.uint8), state.large_bytes)
        order = np.load(folder / f"{name}.{frames}.order.npy", mmap_mode="r")
        episodes = np.load(folder / f"{name}.{frames}.episodes.npy")
    except FileNotFoundError:
        raise
    except Exception as error:  # NumPy's header is a Python literal.
        raise _damaged(folder, error) from error
    return Cache(columns, records, large, order, episodes, folder, state)
