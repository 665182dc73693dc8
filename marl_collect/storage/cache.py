"""Decoded frames on disk, which readers map.

The folder of a cache has files of one *generation*, a random name:

- ``G.records``: a NumPy record per frame with all small keys, and for large ones where
  they begin and end in ``G.large``.
- ``G.large``: large frames, each compressed with LZ4.
- ``G.index``: run, trajectory, number in the episode and end of each frame.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.errors import DatasetError
from marl_collect.files.atomic import sync, write_atomically
from marl_collect.storage.arrow import pa
from marl_collect.storage.columns import (
    DONE,
    FRAME_INDEX,
    Column,
    columns_of,
    decode,
    described,
    flat_rows,
    runs_of,
)
from marl_collect.storage.description import difference
from marl_collect.storage.files import BatchFile, naming, read_about, read_table

_FORMAT: Final = 4
_STATE: Final = "state.json"
_INDEX: Final = np.dtype(
    [("traj_id", "<i8"), ("run", "<i4"), ("frame_index", "<i4"), ("done", "?")],
    align=True,
)
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
            f"{name}.index": frames * _INDEX.itemsize,
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
        large: bytes of large frames, mapped; None if there are none.
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
    large: NDArray[np.uint8] | None
    order: NDArray[np.int64]
    episodes: NDArray[Any]
    folder: Path
    state: CacheState

    @property
    def map(self) -> mmap.mmap:
        """The mapping of the records."""
        mapping: mmap.mmap = self.records._mmap  # type: ignore[attr-defined] # noqa: SLF001
        return mapping

    def verify(self, files: Sequence[BatchFile]) -> None:
        """Decode its files again, and compare; see ``Dataset.verify``."""
        # As it is now: the episodes were read when it was opened.
        on_disk = _mapped(self.folder, self.state, self.columns)
        runs: dict[str, int] = {}
        parts = []
        behind = 0
        for file in files:
            rows, large, entries = _decoded(file, self.columns, runs)
            stored = on_disk.records[behind : behind + len(rows)]
            behind += len(rows)
            for column in self.columns:
                actual, expected = stored[column.name], rows[column.name]
                if not column.is_large:
                    same = actual.tobytes() == expected.tobytes()
                else:
                    pairs = np.unique(np.c_[actual, expected[: len(actual), 0]], axis=0)
                    out = np.empty(column.shape, column.stored)
                    same = len(actual) == len(rows)
                    for *span, number in pairs.tolist():
                        on_disk.large_frame(span, out)
                        same &= out.tobytes() == bytes(large[number])
                if not same:
                    raise self._differs(file.path)
            parts.append(entries)
        index = np.concatenate(parts)
        order, episodes = _episodes(self.columns, index, on_disk.records)
        path = self.folder / f"{self.state.generation}.index"
        same = (
            (runs, len(index)) == (self.state.runs, len(on_disk.records))
            # Not bytes: there are gaps.
            and np.array_equal(np.fromfile(path, _INDEX, len(index)), index)
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
            assert self.large is not None
            part = self.large[begin:end].data
            data = _LZ4.decompress(part, out.nbytes, asbytes=False)
        except (pa.ArrowException, OSError, ValueError, AssertionError) as error:
            raise _damaged(self.folder, error) from error
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)


def _damaged(folder: Path, error: Exception) -> DatasetError:
    return DatasetError(f"The cache {folder} is damaged: {error}. Delete this folder.")


def cache_folder(folders: Sequence[Path], home: Path | None = None) -> Path:
    """Return where the cache of one or several folders is.

    Without ``home``, a folder for caches: in the only folder if that can be written,
    else in the user's caches.
    """
    inside = folders[0] / ".cache"
    parent = inside if inside.exists() else folders[0]
    is_writable = len(folders) == 1 and os.access(parent, os.W_OK | os.X_OK)
    if home is None and is_writable:
        return inside
    names = b"\0".join(os.fsencode(folder.resolve()) for folder in folders)
    return (home or user_cache()) / hashlib.sha256(names).hexdigest()[:24]


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
            raise type(error)(
                error.errno,
                f"The cache of the dataset cannot be written ({error.strerror}): pass "
                "cache=, a folder with free space that may be written to",
                str(folder),
            ) from error
    return files, _mapped(folder, state, columns)


def _record(columns: Sequence[Column]) -> np.dtype[Any]:
    entries: list[Any] = [
        (c.name, "<i8", (2,)) if c.is_large else (c.name, c.stored, c.shape)
        for c in columns
    ]
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
        with ExitStack() as stack:
            records, large, index = (
                stack.enter_context((folder / f"{name}.{kind}").open("ab"))
                for kind in ("records", "large", "index")
            )
            records.truncate(state.frames * dtype.itemsize)
            large.truncate(state.large_bytes)
            index.truncate(state.frames * _INDEX.itemsize)
            for file in files[count:]:
                state.parts.append(file.part())
                rows, frames, entries = _decoded(file, columns, state.runs)
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
                index.write(entries.view(np.uint8).data)
                state.frames += len(rows)
                state.large_bytes = ends[-1]
        entries = np.fromfile(folder / f"{name}.index", _INDEX, state.frames)
        rows = _map(folder / f"{name}.records", dtype, state.frames)
        order, episodes = _episodes(columns, entries, rows)
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
) -> tuple[NDArray[Any], list[memoryview], NDArray[Any]]:
    """Return records, large frames and index of a file; count frames by run."""
    table = read_table(file.path, file.path)
    with naming(file.path):
        text = difference(described(columns), described(columns_of(table.schema)))
        if text:
            raise DatasetError(f"it does not fit the other files: {text}.")
        if not len(table):
            raise DatasetError("it has no frames.")
        rows, large = decode(table, columns, _record(columns))
        names, codes = runs_of(table)
        entries = np.zeros(len(rows), _INDEX)
        entries["frame_index"] = table.column(FRAME_INDEX).to_numpy()
    for code, run in enumerate(names):
        runs[run] = runs.get(run, 0) + int(np.count_nonzero(codes == code))
    numbers = list(runs)
    entries["run"] = np.array([numbers.index(run) for run in names])[codes]
    by_key = {column.key: column.name for column in columns}
    entries["traj_id"] = rows[by_key[TRAJ_IDS]]
    entries["done"] = rows[by_key[DONE]].reshape(-1)
    return rows, large, entries


def _episodes(
    columns: Sequence[Column], index: NDArray[Any], records: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the frames by episode, and the complete episodes.

    An episode is complete if its frames are number 0, 1, 2 and so on, and the last one
    is done. This covers episodes over many batches, in any order of rows.
    """
    order = np.lexsort((index["traj_id"], index["run"]))
    arranged = index[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (arranged["traj_id"][1:] != arranged["traj_id"][:-1]) | (
        arranged["run"][1:] != arranged["run"][:-1]
    )
    first = np.flatnonzero(is_first)
    length = np.diff(np.append(first, len(order)))
    last = first + length - 1
    expected = np.arange(len(order)) - np.repeat(first, length)
    is_wrong = arranged["frame_index"] != expected
    complete = arranged["done"][last] & ~np.logical_or.reduceat(is_wrong, first)
    rewards = [column for column in columns if column.is_reward]
    kind: list[Any] = [
        *(("first", "<i8"), ("length", "<i8"), ("traj_id", "<i8")),
        *(("run", "<i4"), ("terminated", "?")),
        *((c.name, "<f8", c.shape) for c in rewards),
    ]
    episodes = np.zeros(int(complete.sum()), kind)
    episodes["first"], episodes["length"] = first[complete], length[complete]
    for name in ("traj_id", "run"):
        episodes[name] = arranged[name][first[complete]]
    by_key = {c.key: c.name for c in columns}
    if ("next", "terminated") in by_key:
        ends = records[by_key["next", "terminated"]][order[last[complete]]]
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
    mapped: NDArray[Any] = np.memmap(path, dtype, "c", shape=(count,))
    return mapped


def _mapped(folder: Path, state: CacheState, columns: tuple[Column, ...]) -> Cache:
    """Map a complete cache, unless another process has replaced it meanwhile."""
    name, frames = state.generation, state.frames
    try:
        records = _map(folder / f"{name}.records", _record(columns), frames)
        large = None
        if state.large_bytes:
            large = np.memmap(folder / f"{name}.large", np.uint8, "r")
        order = np.load(folder / f"{name}.{frames}.order.npy", mmap_mode="r")
        episodes = np.load(folder / f"{name}.{frames}.episodes.npy")
    except FileNotFoundError:
        raise
    except Exception as error:  # NumPy's header is a Python literal.
        raise _damaged(folder, error) from error
    return Cache(columns, records, large, order, episodes, folder, state)
