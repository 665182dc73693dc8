"""Reads frames of a dataset from mapped segments; no file stays open."""

import ctypes
import mmap
import os
import time
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import VALID
from marl_collect.core.description import Key
from marl_collect.storage.checks import DatasetError, Folder, naming
from marl_collect.storage.episodes import EpisodeTable
from marl_collect.storage.index import (
    ARRAYS,
    RECORDS,
    TAIL,
    BatchEntry,
    Index,
    KeyField,
    Layout,
    dtype_of,
)
from marl_collect.storage.packed import ENTRY, PackedFrames
from marl_collect.storage.records import Bytes, Column
from marl_collect.storage.remote import RemoteFolder
from marl_collect.storage.spans import Spans
from marl_collect.storage.statistics import Range, read_notes

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

_DONE: Final = ("next", "done")
_RECENT: Final = 50_000_000
"""Nanoseconds after a change of a file in which another change may have the same time
(ticks of the kernel take up to 10 ms)."""
_AHEAD: Final = 2**25
"""Batches that are read as a whole are fetched up to the next multiple of this many
bytes of a file, because one request for each batch takes long."""


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"data-{number:06d}"


@final
class Segment:
    """One data file, mapped on first use.

    Attributes:
        folder: of the dataset.
        name: of the file.
        size: how many of its bytes the journal lists.
    """

    def __init__(self, folder: Folder, number: int, size: int) -> None:
        """Prepare reading."""
        self.folder = folder
        self.name = segment_name(number)
        self.size = size
        self._map: Bytes | None = None
        self._inode = -1
        self._identity: tuple[int, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the map; another process makes its own."""
        return self.__dict__ | {"_map": None, "_identity": None}

    def changed(self) -> bool:
        """Return whether the file may have changed since the last call.

        Raises:
            DatasetError: if it is missing, a link, or too small.
        """
        status = self.folder.locate(self.name, self.size)
        if isinstance(self.folder, RemoteFolder):
            return False  # Others only add equal blocks to a cache.
        identity = (status.st_ino, status.st_size, status.st_mtime_ns)
        if identity == self._identity:
            return False
        if status.st_ino != self._inode:
            self._map = None  # Another file is there now.
        recent = time.time_ns() - status.st_mtime_ns < _RECENT
        self._identity = None if recent else identity
        return True

    @property
    def path(self) -> str:
        """Its name in messages."""
        return self.folder.named(self.name)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Make ranges of its bytes readable, which may be in an object store."""
        self.folder.fetch(self.name, ranges)

    @property
    def content(self) -> memoryview:
        """Its listed bytes."""
        if self._map is None:
            self._inode = self.folder.locate(self.name, self.size).st_ino
            self._map = _mapped(self.folder.local(self.name), self.size)
        return self._map.data

    def windows(self, size: int) -> NDArray[Any]:
        """Return all pieces of ``size`` bytes, one beginning at every byte."""
        # One item is `size` bytes, so that indexing copies each piece at once.
        return np.ndarray(
            (self.size - size + 1,), np.dtype((np.void, size)), self.content, 0, (1,)
        )


def _mapped(path: Path, size: int) -> Bytes:
    """Map a file for reading. Unlike Python's mmap, no descriptor stays open."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(
            None,
            ctypes.c_size_t(size),
            mmap.PROT_READ,
            mmap.MAP_PRIVATE,
            descriptor,
            ctypes.c_longlong(0),
        )
    finally:
        os.close(descriptor)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    # Arrays and views of the memory hold it; those that are left at exit may be read.
    weakref.finalize(
        memory, libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)
    ).atexit = False
    array = np.frombuffer(memory, np.uint8)
    array.flags.writeable = False
    return array


@final
class StoredFrames:
    """The frames of one or several folders, by number.

    Attributes:
        name: of the dataset in messages.
        keys: what is read.
        starts: ``[batches + 1]``, number of the first frame of each batch.
        runs: ``[batches]``, the run that wrote each batch; runs of all folders are
            numbered one after the other.
    """

    def __init__(self, name: str, parts: Sequence[tuple[Folder, Index]]) -> None:
        """Prepare reading; no data file is opened."""
        self.name = name
        first = next((index for _, index in parts if index.keys), parts[0][1])
        self.keys = self._all = first.keys
        self._rewards = first.rewards
        groups = first.description.environment.groups
        self._groups = {name: group.n_agents for name, group in groups.items()}
        self._layouts: list[Layout] = []
        self._segments: list[Segment] = []
        self._entries: list[BatchEntry] = []
        self._packed: dict[int, dict[Key, PackedFrames]] = {}  # Of verified batches.
        columns: list[tuple[int, ...]] = []
        runs = 0
        for folder, index in parts:
            self._layouts += index.layouts
            numbers = {id(layout): n for n, layout in enumerate(self._layouts)}
            segments: dict[int, int] = {}
            for number, end in index.ends.items():
                segments[number] = len(self._segments)
                self._segments.append(Segment(folder, number, end))
            self._entries += index.batches
            columns += [
                (
                    segments[entry.segment],
                    numbers[id(entry.layout)],
                    entry.offset,
                    entry.tails_at,
                    entry.tails,
                    runs + entry.run,
                    *entry.shape,
                )
                for entry in index.batches
            ]
            runs += len(index.runs)
        table = np.array(columns, np.int64).reshape(-1, 8).T
        self._segment, self._layout, self._records, self._tails = table[:4]
        self._n_tails, self.runs, self._rows, self._length = table[4:]
        counts = self._rows * self._length
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._verified = np.zeros(len(self._entries), np.bool_)
        # One layout for the contents of all that have equal placements.
        joined: dict[Any, Layout] = {}
        for layout in self._layouts:
            # Usually a later layout can store all that earlier ones can.
            before = joined.get(layout.placement, layout)
            joined[layout.placement] = layout.fitting(before.record, before.tail)
        self._joined = list(joined.values())
        order = [[*joined].index(layout.placement) for layout in self._layouts]
        self._placement = np.array(order, np.int64)[self._layout]
        self._plans: dict[Layout, Any] = {}  # What to read in joined layouts.

    def __getstate__(self) -> dict[str, Any]:
        """Return the state; another process verifies for itself."""
        unknown = np.zeros_like(self._verified)
        return self.__dict__ | {"_verified": unknown, "_packed": {}, "_plans": {}}

    def select(self, *keys: str | Key) -> "StoredFrames":
        """Return the same frames with these keys, and those below them, only.

        Raises:
            KeyError: if a key does not exist.
        """
        wanted = [(key,) if isinstance(key, str) else tuple(key) for key in keys]
        for key in wanted:
            if not any(item.key[: len(key)] == key for item in self.keys):
                names = ", ".join("/".join(item.key) for item in self.keys)
                raise KeyError(
                    f"There is no key {'/'.join(key)} in {self.name}; it has {names}."
                )
        return self._with(
            item
            for item in self.keys
            if any(item.key[: len(key)] == key for key in wanted)
        )

    def _with(self, keys: Iterable[KeyField]) -> "StoredFrames":
        selected = object.__new__(StoredFrames)
        # Maps and what was verified are shared.
        selected.__dict__.update(self.__dict__, keys=tuple(keys), _plans={})
        return selected

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._entries)

    def read(self, numbers: NDArray[np.int64]) -> "dict[Key, torch.Tensor]":
        """Copy frames: each key ``[n, ...]``, in the order of ``numbers``.

        Raises:
            DatasetError: if a file is missing, damaged, a link, or of the wrong size.
        """
        content = self._content(numbers)
        return {item.key: tensor_of(item, content[item.key]) for item in self.keys}

    def arrays(self, numbers: NDArray[np.int64]) -> dict[Key, NDArray[Any]]:
        """Copy frames as ``read`` does, without torch; float32 instead of bfloat16.

        Raises:
            DatasetError: as ``read``.
        """
        content = self._content(numbers)
        return {
            item.key: _array(content[item.key], item.shape, ARRAYS[item.dtype])
            if item.dtype in ARRAYS
            else tensor_of(item, content[item.key]).float().numpy()
            for item in self.keys
        }

    def _content(self, numbers: NDArray[np.int64]) -> dict[Key, Bytes]:
        """Copy the bytes ``[n, size]`` of each key of some frames."""
        batches = np.searchsorted(self.starts, numbers, side="right") - 1
        self._check(batches)
        placements = self._placement[batches]
        if len(placements) and (placements == placements[0]).all():
            return self._read(self._joined[placements[0]], numbers, batches)
        out = {
            item.key: np.empty((len(numbers), item.nbytes), np.uint8)
            for item in self.keys
        }
        for placement in np.unique(placements).tolist():
            chosen = np.flatnonzero(placements == placement)
            layout = self._joined[placement]
            some = self._read(layout, numbers[chosen], batches[chosen])
            for key, rows in out.items():
                rows[chosen] = some[key]
        return out

    def in_group(self, key: Key) -> bool:
        """Return whether a root key is of the agents of a group."""
        return key[0] in self._groups

    def nested(
        self,
        tensors: "Mapping[Key, torch.Tensor]",
        shape: Sequence[int],
        *,
        time: bool = True,
    ) -> "TensorDict":
        """Return tensors ``[prod(shape), ...]`` as a TensorDict of that shape.

        Args:
            tensors: by key.
            shape: batch size.
            time: whether the last dimension is time.
        """
        from marl_collect.core.tensordicts import assemble
        from marl_collect.storage.samples import Sample

        shaped = {key: t.view(*shape, *t.shape[1:]) for key, t in tensors.items()}
        return assemble(shaped, shape, self._groups, time=time, kind=Sample)

    def _read(
        self, layout: Layout, frames: NDArray[np.int64], batches: NDArray[np.int64]
    ) -> dict[Key, Bytes]:
        """Read frames of batches; ``layout`` is the joined one of their placement."""
        n = len(frames)
        packed, columns, shared = self._wanted(layout)
        content: dict[Key, Bytes] = {
            key: np.empty((n, size), np.uint8) for key, size in packed.items()
        }
        if packed:
            self._unpack(list(packed), frames, batches, content)
        if not columns:
            return content
        if shared:
            stored, following, with_tail, tails = self._with_following(
                layout, frames, batches
            )
        else:
            numbers = frames - self.starts[batches]
            stored = self._stored(layout, batches, numbers, tails=False)
        for key, column in columns.items():
            if key not in shared:
                content[key] = column.read(stored[:n])
                continue
            after_key, tail_column = shared[key]
            if column.is_constant:  # Filling rows is faster than choosing them.
                content[key], after = column.read(stored[:n]), column.read(stored[:n])
            else:
                values = column.read(stored)
                content[key], after = values[:n], values.take(following, 0)
            content[after_key] = after
            if len(with_tail):
                after[with_tail] = tail_column.read(tails)
        return content

    def _wanted(
        self, layout: Layout
    ) -> tuple[dict[Key, int], dict[Key, Column], dict[Key, tuple[Key, Column]]]:
        """Return what to read in a layout, by key.

        Returns:
            The bytes of packed frames; the columns of records, with the roots of next
            keys; and by root key the next keys whose usual value is in the records,
            with the columns of tails.
        """
        if layout not in self._plans:
            sizes = {item.key: item.nbytes for item in self.keys}
            shared = {
                key[1:]: (key, layout.tail.column(*layout.tails[key]))
                for key in layout.follows
                if key in sizes
            }
            packed = {key: sizes[key] for key in layout.packed if key in sizes}
            columns = {
                key: layout.record.column(*bounds)
                for key, bounds in layout.records.items()
                if key in sizes or key in shared
            }
            self._plans[layout] = packed, columns, shared
        return self._plans[layout]

    def _with_following(
        self,
        layout: Layout,
        frames: NDArray[np.int64],
        batches: NDArray[np.int64],
    ) -> tuple[Bytes, NDArray[np.int64], NDArray[np.int64], Bytes]:
        """Copy records, and those that follow them, which have most next values.

        Args:
            layout: of what is returned.
            frames: ``[n]``, numbers of the frames.
            batches: ``[n]``, their batches.

        Returns:
            The records, behind them the following ones that are not among them; for
            each frame, which of these records follows it; which frames have a tail
            instead; and these tails.

        Raises:
            DatasetError: if a record has no following record and no tail.
        """
        n = len(frames)
        numbers = frames - self.starts[batches]
        stored = self._stored(layout, batches, numbers, tails=False)
        tail = layout.record.column(0, TAIL).read(stored).view("<u4")[:, 0]
        follows = tail == 0
        with_tail = np.flatnonzero(tail)
        if (follows & ((numbers + 1) % self._length[batches] == 0)).any() or (
            tail > self._n_tails[batches]
        ).any():
            raise DatasetError(
                f"A record in {self.name} refers to a place where nothing is."
            )
        # The following record is often the next one that is read anyway.
        adjacent = np.zeros(n, np.bool_)
        adjacent[:-1] = frames[1:] == frames[:-1] + 1
        absent = np.flatnonzero(follows & ~adjacent)
        following = np.arange(1, n + 1)
        following[absent] = np.arange(n, n + len(absent))
        following[with_tail] = 0  # The value is replaced by that of the tail.
        if len(absent):
            others = batches[absent], numbers[absent] + 1
            added = self._stored(layout, *others, tails=False)
            stored = np.concatenate([stored, added])
        tail_numbers = tail[with_tail].astype(np.int64) - 1
        tails = self._stored(layout, batches[with_tail], tail_numbers, tails=True)
        return stored, following, with_tail, tails

    def _stored(
        self,
        target_layout: Layout,
        batches: NDArray[np.int64],
        numbers: NDArray[np.int64],
        *,
        tails: bool,
    ) -> Bytes:
        """Copy records or tails.

        Args:
            target_layout: how they are returned.
            batches: of each.
            numbers: in its batch.
            tails: whether to copy tails.
        """
        begins = self._tails if tails else self._records
        layouts = self._layout[batches]
        target = target_layout.tail if tails else target_layout.record
        out = np.empty((len(batches), target.size), np.uint8)
        if not len(batches):  # Often there are no tails.
            return out
        for number in np.unique(layouts).tolist():
            layout = self._layouts[number]
            source = layout.tail if tails else layout.record
            chosen = np.flatnonzero(layouts == number)
            some = batches[chosen]
            if not tails and RECORDS in layout.packed:
                stored = np.empty((len(some), source.size), np.uint8)
                frames = self.starts[some] + numbers[chosen]
                self._unpack([RECORDS], frames, some, {RECORDS: stored})
            else:
                at = begins[some] + numbers[chosen] * source.size
                stored = self._gather(self._segment[some], at, source.size)
            if source is not target:
                whole = source.column(0, len(source.kind))
                stored = target.encode(whole.read(stored))
            if len(chosen) == len(batches):
                return stored
            out[chosen] = stored
        return out

    def _gather(
        self, segments: NDArray[np.int64], at: NDArray[np.int64], size: int
    ) -> Bytes:
        """Copy pieces of ``size`` bytes, ``[n, size]``, at positions in segments."""
        if not size:
            return np.empty((len(at), 0), np.uint8)
        first = int(segments[0])
        if len(self._segments) == 1 or (segments == first).all():
            # take() would copy all windows first.
            pieces = self._segments[first].windows(size)[at]
        else:
            pieces = np.empty(len(at), np.dtype((np.void, size)))
            for segment in np.unique(segments).tolist():
                chosen = segments == segment
                pieces[chosen] = self._segments[segment].windows(size)[at[chosen]]
        return pieces.view(np.uint8).reshape(len(at), size)

    def _unpack(
        self,
        keys: Sequence[Key],
        frames: NDArray[np.int64],
        batches: NDArray[np.int64],
        out: Mapping[Key, Bytes],
    ) -> None:
        """Read packed frames."""
        order = np.argsort(frames, kind="stable")  # Front to back.
        numbers = (frames - self.starts[batches])[order].tolist()
        # A frame and the one after it are often both read: decode once.
        targets: dict[tuple[int, Key, int], list[Bytes]] = {}
        for row, batch, number in zip(
            order.tolist(), batches[order].tolist(), numbers, strict=True
        ):
            for key in keys:
                source = batch, key, number
                begin, end = self._packed[batch][key].extent(number)
                if begin == end:  # It is the following frame of the root key.
                    source = batch, key[1:], number + 1
                targets.setdefault(source, []).append(out[key][row])
        for segment in np.unique(self._segment[batches]).tolist():
            self._segments[segment].fetch(
                self._packed_of(*source).extent(source[2])
                for source in targets
                if self._segment[source[0]] == segment
            )
        for source, rows in targets.items():
            content = self._segments[self._segment[source[0]]].content
            self._packed_of(*source).read(content, source[2], rows[0])
            for row in rows[1:]:
                row[:] = rows[0]

    def _packed_of(self, batch: int, key: Key, number: int) -> PackedFrames:
        """Return the frames of a key of a batch, one of which has this number."""
        packed = self._packed[batch].get(key)
        if packed is None or number >= len(packed.ends):
            raise DatasetError(f"{self.name} refers to a frame that is not there.")
        return packed

    def _check(self, batches: NDArray[np.int64]) -> None:
        """Check the files of batches, and what was not verified in them yet."""
        self._forget_changed(np.unique(self._segment[batches]).tolist())
        if self._verified[batches].all():
            return
        todo = np.unique(batches[~self._verified[batches]])
        for number in np.unique(self._segment[todo]).tolist():
            some = [self._entries[b] for b in todo[self._segment[todo] == number]]
            self._segments[number].fetch((e.offset, e.packed_at) for e in some)
        for batch in todo.tolist():
            self._verify(batch)
            self._verified[batch] = True

    def _forget_changed(self, segments: Iterable[int]) -> None:
        """Forget what was verified in those of the data files that have changed."""
        for number in segments:
            if self._segments[number].changed():
                self._verified[self._segment == number] = False

    def _verify(self, batch: int) -> None:
        """Compare the checksum of all but the packed frames of a batch."""
        entry, segment = self._entries[batch], self._segments[self._segment[batch]]
        checksum = zlib.crc32(segment.content[entry.offset : entry.packed_at])
        if checksum != entry.checksum:
            raise DatasetError(
                f"{segment.path} is damaged: the checksum of batch {batch} is "
                f"{checksum:08x}, not {entry.checksum:08x}. Restore the file from a "
                "copy."
            )
        begin, first = entry.tables_at, entry.packed_at
        packed = self._packed[batch] = {}
        for key, (codec, size) in zip(entry.layout.packed, entry.packed, strict=True):
            end = begin + ENTRY * entry.count
            table = bytes(segment.content[begin:end])
            name = f"{segment.path}: {'/'.join(key) or 'records'}"
            packed[key] = PackedFrames.of(name, codec, table, first, size)
            begin, first = end, first + size

    def verify(self, batch: int) -> None:
        """Compare every checksum of a batch, and check its episodes.

        Raises:
            DatasetError: if a file is missing, damaged, a link, or too small.
        """
        self.stored_bytes(batch)
        self._check_ends(batch, self.episodes(batch))

    def stored_bytes(self, batch: int) -> memoryview:
        """Return all bytes of a batch, after comparing every checksum.

        Raises:
            DatasetError: if a file is missing, damaged, a link, or too small.
        """
        entry, segment = self._entries[batch], self._segments[self._segment[batch]]
        self._forget_changed([self._segment[batch]])
        self._verified[batch] = False
        # Usually the next batches are read too.
        ahead = min(segment.size, -(-entry.end // _AHEAD) * _AHEAD)
        segment.fetch([(entry.offset, ahead)])
        self._verify(batch)
        for packed in self._packed[batch].values():
            for number in np.flatnonzero(~packed.follows()).tolist():
                packed.stored(segment.content, number)
        self._verified[batch] = True
        return segment.content[entry.offset : entry.end]

    def _notes(self, batch: int) -> tuple[EpisodeTable, dict[Key, Range]]:
        self._check(np.array([batch]))
        entry, segment = self._entries[batch], self._segments[self._segment[batch]]
        with naming(segment.path, "a data file with notes"):
            notes = bytes(segment.content[entry.notes_at : entry.packed_at])
            return read_notes(notes, entry.episodes, self._all, self._rewards)

    def episodes(self, batch: int) -> EpisodeTable:
        """Return the episodes that ended in a batch.

        Raises:
            DatasetError: if a file is damaged, or an episode is outside of the batch.
        """
        entry = self._entries[batch]
        table, _ = self._notes(batch)
        inside = (table.environment < entry.shape[0]) & (table.frame < entry.shape[1])
        ends = np.unique(table.environment * entry.shape[1] + table.frame)
        if not inside.all() or (table.length < 1).any() or len(ends) != len(table):
            raise DatasetError(
                f"{self.name} lists an episode in batch {batch} that cannot be there."
            )
        return table

    def all_episodes(self) -> EpisodeTable:
        """Return the episodes that ended in all batches.

        Raises:
            DatasetError: as for ``episodes``.
        """
        tables = [self.episodes(batch) for batch in range(len(self))]
        return EpisodeTable.joined(tables, self._rewards)

    def ranges(self, batch: int) -> dict[Key, Range]:
        """Return the range of each key in the valid frames of a batch.

        Raises:
            DatasetError: if a file is damaged.
        """
        _, ranges = self._notes(batch)
        return {item.key: ranges[item.key] for item in self.keys}

    def valid(self, batch: int) -> NDArray[np.int64]:
        """Return the number of valid frames of each row; they are the first ones.

        Raises:
            DatasetError: if the batch's mask contradicts the journal.
        """
        entry = self._entries[batch]
        size, length = entry.shape
        if entry.frames == entry.count:
            return np.full(size, length)
        (mask,) = self.only(VALID).arrays(self.frames(batch)).values()
        rows = mask.reshape(size, length)
        counts = rows.sum(1)
        if (
            counts.sum() != entry.frames
            or (rows != (np.arange(length) < counts[:, None])).any()
        ):
            raise DatasetError(
                f"The mask of batch {batch} of {self.name} does not mark the first "
                f"frames of each row, {entry.frames} in all, as the journal says."
            )
        return counts

    def frames(self, batch: int) -> NDArray[np.int64]:
        """Return the numbers of all frames of a batch."""
        return np.arange(self.starts[batch], self.starts[batch + 1])

    def only(self, key: Key) -> "StoredFrames":
        """Return the same frames with one key, whether it is selected or not."""
        return self._with(item for item in self._all if item.key == key)

    def _check_ends(self, batch: int, episodes: EpisodeTable) -> None:
        """Check that episodes end where ``("next", "done")`` is True."""
        if not len(episodes) or all(item.key != _DONE for item in self._all):
            return
        length = self._entries[batch].shape[1]
        at = self.starts[batch] + episodes.environment * length + episodes.frame
        if not bool(self.only(_DONE).arrays(at)[_DONE].all()):
            raise DatasetError(
                f"{self.name} lists an episode in batch {batch} that ends where "
                "('next', 'done') is False."
            )

    def all_spans(self) -> Spans:
        """Return the valid frames of all batches."""
        begins, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for batch, entry in enumerate(self._entries):
            first, last = self.starts[batch : batch + 2]
            if entry.frames == entry.count:
                rows, counts = np.array([first]), np.array([last - first])
            else:
                rows, counts = np.arange(first, last, entry.shape[1]), self.valid(batch)
            begins.append(rows)
            ends.append(rows + counts)
        begin, end = np.concatenate(begins), np.concatenate(ends)
        return Spans(begin, end, np.arange(len(begin) + 1)).joined()

    def episode_spans(self) -> tuple[EpisodeTable, Spans, NDArray[np.int64]]:
        """Return the episodes, their frames, and the run that wrote each.

        Raises:
            DatasetError: if a file is damaged, or the first frames of an episode are
                missing.
        """
        table = self.all_episodes()
        batches = np.repeat(
            np.arange(len(self)), [entry.episodes for entry in self._entries]
        )
        # From the last batch of an episode back to the one in which it began.
        episodes, batch, missing = np.arange(len(table)), batches, table.length
        row = self.starts[batch] + table.environment * self._length[batch]
        end = row + table.frame + 1
        parts = [(episodes[:0], end[:0], end[:0])]
        while len(episodes):
            begin = np.maximum(row, end - missing)
            parts.append((episodes, begin, end))
            missing = missing - (end - begin)
            longer = missing > 0
            episodes, batch, missing = episodes[longer], batch[longer], missing[longer]
            environment = table.environment[episodes]
            before = batch - 1  # -1 is refused: it would be the last batch.
            lost = (before < 0) | (self.runs[before] != self.runs[batch])
            lost |= self._rows[before] <= environment
            for i in np.flatnonzero(lost)[:1].tolist():
                raise DatasetError(
                    f"{self.name} lists an episode of {table.length[episodes[i]]} "
                    f"frames whose first {missing[i]} frames are not there."
                )
            batch = before
            row = self.starts[batch] + environment * self._length[batch]
            end = row + self._row_frames(batch, environment)
        episodes, begin, end = (
            np.concatenate(arrays) for arrays in zip(*parts[::-1], strict=True)
        )
        # The parts are in the order of time now, and sorting does not change that.
        order = np.argsort(episodes, kind="stable")
        first = np.searchsorted(episodes[order], np.arange(len(table) + 1))
        return table, Spans(begin[order], end[order], first), self.runs[batches]

    def _row_frames(
        self, batches: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the number of valid frames of rows of batches."""
        counts = self._length[batches]
        for batch in np.unique(batches).tolist():
            entry = self._entries[batch]
            if entry.frames != entry.count:
                chosen = batches == batch
                counts[chosen] = self.valid(batch)[rows[chosen]]
        return counts


def _array(content: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the bytes ``[n, size]`` of frames of a key as numbers ``[n, *shape]``."""
    if not content.size:
        return np.empty((len(content), *shape), dtype)
    return content.view(dtype).reshape(-1, *shape)


def tensor_of(item: KeyField, content: Bytes) -> "torch.Tensor":
    """Return the bytes ``[n, size]`` of frames of one key as a tensor."""
    import torch

    known = ARRAYS.get(item.dtype)
    if known is not None:
        return torch.from_numpy(_array(content, item.shape, known))
    dtype = dtype_of(item.dtype)  # NumPy has no bfloat16.
    if not content.size:
        return torch.empty((len(content), *item.shape), dtype=dtype, device="cpu")
    return torch.from_numpy(content).view(dtype).view(len(content), *item.shape)
