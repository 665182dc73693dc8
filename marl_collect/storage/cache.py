"""Decoded frames on disk, which readers map.

The folder of a cache has files of one *generation*, a random name:

- ``G.records``: a NumPy record per frame with all small keys, and for large ones where
  they begin and end in ``G.large``.
- ``G.large``: large frames, each compressed with LZ4.
- ``G.index``: run, trajectory, number in the episode and end of each frame.
- ``G.N.order.npy``, ``G.N.episodes.npy``: the frames by episode, and the complete
  episodes, of the first N frames.
- ``state.json``: what is complete. Everything behind it is rubbish of a killed process.

A file that was added to the dataset is appended. If a file was removed, replaced or
joined to others, a new generation is written: what readers have mapped never changes.
What the files in front of it hold is copied.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.files.atomic import sync, write_atomically
from marl_collect.storage.arrow import pa
from marl_collect.storage.checks import DatasetError, naming
from marl_collect.storage.columns import (
    DONE,
    FRAME_INDEX,
    Column,
    columns_difference,
    columns_of,
    decode,
    flat_rows,
    runs_of,
)
from marl_collect.storage.files import BatchFile, read_schema, read_table

_FORMAT: Final = 3
_STATE: Final = "state.json"
_INDEX: Final = np.dtype(
    [("traj_id", "<i8"), ("run", "<i4"), ("frame_index", "<i4"), ("done", "?")],
    align=True,
)
_LZ4: Final = pa.Codec("lz4_raw")
_KINDS: Final = ("records", "large", "index")


class _Part(NamedTuple):
    """What a cache has of a file."""

    first: str  # Names of its first and its last batch.
    last: str
    end: int  # Number of the frame behind it.
    large_end: int  # Where its large frames end.
    modified: int  # Time in nanoseconds.


@final
@dataclass
class CacheState:
    """What is complete in a cache.

    Attributes:
        dtype: of a record, as text.
        generation: beginning of the names of its files.
        runs: number of frames of each run by name, in the order of their numbers.
        parts: what it has of each file, in their order. A file of joined batches stands
            for several.
        version: of this layout.
    """

    dtype: str
    generation: str = field(default_factory=lambda: secrets.token_hex(8))
    runs: dict[str, int] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)
    version: int = _FORMAT

    @classmethod
    def read(cls, folder: Path, dtype: np.dtype[Any]) -> Self | None:
        """Return the state of a cache of such records, None if it lacks a file."""
        try:
            data = json.loads((folder / _STATE).read_text())
            known = {entry.name for entry in fields(cls)}
            if set(data) != known or data["version"] != _FORMAT:
                return None
            state = cls(**data | {"parts": [_Part(*part) for part in data["parts"]]})
            sizes = state.sizes(dtype).items()
            is_whole = all((folder / f).stat().st_size >= n for f, n in sizes)
            if state.dtype == str(dtype) and is_whole:
                return state
        except (OSError, ValueError, TypeError):
            pass
        return None

    @property
    def frames(self) -> int:
        """Number of records."""
        return self.parts[-1].end if self.parts else 0

    @property
    def large_bytes(self) -> int:
        """Bytes of the large frames."""
        return self.parts[-1].large_end if self.parts else 0

    def known(self, files: Sequence[BatchFile]) -> tuple[int, int]:
        """Return of how many files, from the first one on, it has how many parts."""
        count = used = 0
        for file in files:
            modified = file.path.stat().st_mtime_ns
            if used == len(self.parts) or self.parts[used].first != file.begin:
                break
            last = used
            while self.parts[last].last != file.end and last < len(self.parts) - 1:
                last += 1
            if self.parts[last][1::3] != (file.end, modified):
                break
            count, used = count + 1, last + 1
        return count, used

    def has(self, files: Sequence[BatchFile]) -> bool:
        """Whether it has these files, and no others."""
        return self.known(files) == (len(files), len(self.parts))

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
        records: one per frame, mapped; what is written to them stays in this process.
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
    def runs(self) -> list[str]:
        """Names of the runs, by number."""
        return list(self.state.runs)

    @property
    def map(self) -> mmap.mmap:
        """The mapping of the records."""
        mapping: mmap.mmap = self.records._mmap  # type: ignore[attr-defined] # noqa: SLF001
        return mapping

    def saved(self, name: str) -> dict[str, Any]:
        """Return what ``save`` has kept; empty if there is nothing that fits."""
        with suppress(OSError, ValueError):
            checksum, _, text = self._derived(name).read_text().partition(" ")
            if int(checksum, 16) == zlib.crc32(text.encode()):
                content: dict[str, Any] = json.loads(text)
                return content
        return {}

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep what was computed from all frames, for the next processes.

        Failing is no error: the folder may be read-only, or the disk full.
        """
        text = json.dumps(content)
        line = f"{zlib.crc32(text.encode()):08x} {text}"
        with suppress(OSError):
            write_atomically(self._derived(name), line)

    def _derived(self, name: str) -> Path:
        state = self.state
        return self.folder / f"{state.generation}.{state.frames}.{name}.json"

    def verify(self, files: Sequence[BatchFile]) -> None:
        """Decode its files again, and compare; see ``Dataset.verify``."""
        builder = _Builder(self.folder, self.columns, self.records.dtype)
        runs: dict[str, int] = {}
        parts = []
        behind = 0
        for file in files:
            rows, large, entries = builder.decoded(file, runs)
            stored = self.records[behind : behind + len(rows)]
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
                        self.large_frame(span, out)
                        same &= out.tobytes() == bytes(large[number])
                if not same:
                    raise self._differs(file.path)
            parts.append(entries)
        index = np.concatenate(parts)
        order, episodes = builder.episodes(index, self.records)
        path = self.folder / f"{self.state.generation}.index"
        same = (
            (runs, len(index)) == (self.state.runs, len(self.records))
            # Not bytes: there are gaps.
            and np.array_equal(np.fromfile(path, _INDEX, len(index)), index)
            and np.array_equal(order, self.order)
            and episodes.dtype == self.episodes.dtype
            and episodes.tobytes() == self.episodes.tobytes()
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
    files: list[BatchFile], folder: Path, list_again: Callable[[], list[BatchFile]]
) -> tuple[list[BatchFile], Cache]:
    """Bring the cache in ``folder`` up to date, and map it.

    ``list_again`` returns the files when other readers have been waited for, and this
    function the files that the cache has. A FileNotFoundError is one of a file that has
    vanished; a writer may have joined it.
    """
    columns = columns_of(read_schema(files[0].path))
    dtype = _record(columns)
    state = CacheState.read(folder, dtype)
    if state is None or not state.has(files):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Another reader may have done it, also with files that are newer.
                files = list_again()
                state = CacheState.read(folder, dtype) or CacheState(str(dtype))
                if not state.has(files):
                    state = _Builder(folder, columns, dtype).build(state, files)
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


@dataclass
class _Builder:
    """Writes decoded frames; holds the cache's lock."""

    folder: Path
    columns: tuple[Column, ...]
    dtype: np.dtype[Any]

    def build(self, state: CacheState, files: Sequence[BatchFile]) -> CacheState:
        """Append what is new to the cache, or write a new generation.

        What the published state does not name is deleted: rubbish of killed builders
        before, and afterwards the old generation, or the new one if this fails.
        """
        self._clean()
        try:
            count, used = state.known(files)
            if used < len(state.parts):
                state = self._beginning(state, used)
            return self._extend(state, files[count:])
        finally:
            self._clean()

    def _beginning(self, state: CacheState, used: int) -> CacheState:
        """Copy what a cache has of its first files to a new generation."""
        new = CacheState(str(self.dtype), parts=state.parts[:used])
        if not used:
            return new
        for kind in _KINDS:  # What is too long is cut before it is appended to.
            shutil.copyfile(
                self.folder / f"{state.generation}.{kind}",
                self.folder / f"{new.generation}.{kind}",
            )
        path = self.folder / f"{new.generation}.index"
        counts = np.bincount(np.fromfile(path, _INDEX, new.frames)["run"]).tolist()
        new.runs = dict(zip(state.runs, counts, strict=False))
        return new

    def _extend(self, state: CacheState, files: Sequence[BatchFile]) -> CacheState:
        name = state.generation
        with ExitStack() as stack:
            records, large, index = (
                stack.enter_context((self.folder / f"{name}.{kind}").open("ab"))
                for kind in _KINDS
            )
            records.truncate(state.frames * self.dtype.itemsize)
            large.truncate(state.large_bytes)
            index.truncate(state.frames * _INDEX.itemsize)
            for file in files:
                modified = file.path.stat().st_mtime_ns
                rows, frames, entries = self.decoded(file, state.runs)
                ends = [state.large_bytes]
                for frame in frames:
                    size = 0
                    if frame.nbytes:
                        size = large.write(_LZ4.compress(frame, asbytes=False))
                    ends.append(ends[-1] + size)
                spans = np.array([ends[:-1], ends[1:]], np.int64).T
                for column in self.columns:
                    if column.is_large:
                        rows[column.name] = spans[rows[column.name][:, 0]]
                records.write(rows.view(np.uint8).data)
                index.write(entries.view(np.uint8).data)
                end = state.frames + len(rows)
                state.parts.append(_Part(file.begin, file.end, end, ends[-1], modified))
        entries = np.fromfile(self.folder / f"{name}.index", _INDEX, state.frames)
        rows = _map(self.folder / f"{name}.records", self.dtype, state.frames)
        order, episodes = self.episodes(entries, rows)
        np.save(self.folder / f"{name}.{state.frames}.order.npy", order)
        np.save(self.folder / f"{name}.{state.frames}.episodes.npy", episodes)
        for current in state.sizes(self.dtype):
            sync(self.folder / current, os.O_RDWR)
        write_atomically(self.folder / _STATE, json.dumps(asdict(state)))
        return state

    def decoded(
        self, file: BatchFile, runs: dict[str, int]
    ) -> tuple[NDArray[Any], list[memoryview], NDArray[Any]]:
        """Return records, large frames and index of a file; count frames by run."""
        table = read_table(file.path, file.path)
        with naming(file.path):
            text = columns_difference(self.columns, columns_of(table.schema))
            if text:
                raise DatasetError(f"it does not fit the other files: {text}.")
            if not len(table):
                raise DatasetError("it has no frames.")
            rows, large = decode(table, self.columns, self.dtype)
            names, codes = runs_of(table)
            entries = np.zeros(len(rows), _INDEX)
            entries["frame_index"] = table.column(FRAME_INDEX).to_numpy()
        for code, run in enumerate(names):
            runs[run] = runs.get(run, 0) + int(np.count_nonzero(codes == code))
        numbers = list(runs)
        entries["run"] = np.array([numbers.index(run) for run in names])[codes]
        by_key = {column.key: column.name for column in self.columns}
        entries["traj_id"] = rows[by_key[TRAJ_IDS]]
        entries["done"] = rows[by_key[DONE]].reshape(-1)
        return rows, large, entries

    def episodes(
        self, index: NDArray[Any], records: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the frames by episode, and the complete episodes.

        An episode is complete if its frames are number 0, 1, 2 and so on, and the last
        one is done. This covers episodes over many batches, in any order of rows.
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
        rewards = [column for column in self.columns if column.is_reward]
        columns: list[Any] = [
            *(("first", "<i8"), ("length", "<i8"), ("traj_id", "<i8")),
            *(("run", "<i4"), ("terminated", "?")),
            *((c.name, "<f8", c.shape) for c in rewards),
        ]
        episodes = np.zeros(int(complete.sum()), columns)
        episodes["first"], episodes["length"] = first[complete], length[complete]
        for name in ("traj_id", "run"):
            episodes[name] = arranged[name][first[complete]]
        by_key = {c.key: c.name for c in self.columns}
        if ("next", "terminated") in by_key:
            ends = records[by_key["next", "terminated"]][order[last[complete]]]
            episodes["terminated"] = flat_rows(ends).any(1)
        for column in rewards:
            values = np.asarray(records[column.name])[order].astype(np.float64)
            episodes[column.name] = np.add.reduceat(values, first)[complete]
        # Added batches leave the numbers of episodes as they are.
        return order, episodes[np.argsort(order[last[complete]])]

    def _clean(self) -> None:
        """Delete what the published state does not name, as far as that is possible.

        What stays only takes space: names of generations are never used again.
        """
        state = CacheState.read(self.folder, self.dtype)
        current = {*(state.sizes(self.dtype) if state else ()), _STATE, ".lock"}
        for path in self.folder.iterdir():
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
