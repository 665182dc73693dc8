"""The journal, which lists what a dataset holds, one line per entry.

``journal.jsonl`` has the description of the dataset, then its runs, keys, layouts and
batches in the order of writing. A line is the CRC-32 of all JSON texts up to and
including its own, as eight hexadecimal digits, a space, and the JSON text. A last line
without a line feed was not written completely and does not count.
"""

import json
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from marl_collect.buffers.layout import TRAJ_IDS, VALID
from marl_collect.core.description import Key
from marl_collect.storage.checks import (
    DatasetError,
    Folder,
    integer,
    key_of,
    naming,
    numbers,
    shape_of,
)
from marl_collect.storage.description import (
    DatasetDescription,
    Metadata,
    RunDescription,
    difference,
)
from marl_collect.storage.packed import ENTRY
from marl_collect.storage.records import NOTHING, RecordLayout

if TYPE_CHECKING:
    import torch

JOURNAL: Final = "journal.jsonl"
FORMAT: Final = "marl_collect dataset"
VERSION: Final = 3
"""The index of format versions 1 and 2."""
_LARGEST_FRAME: Final = 2**31
"""Bytes of the largest frame of a key; no simulator comes near."""
RECORDS: Final[Key] = ()
"""Stands for a batch's records among its packed keys, if they are packed."""
_COUNTER: Final = 3
"""Bytes of trajectory ids that vary in any dataset of more than 256 episodes. A layout
that has them from the first batch on need not change."""
_LARGEST_FILE: Final = 2**62
"""Bytes of a data file; positions in it are 64-bit integers."""
_LARGEST_BATCH: Final = 2**40
"""Frames of a batch, valid or not; also those without any byte."""
TAIL: Final = 4
"""Bytes at the beginning of a record: 0 if the next values are in the next record,
otherwise the number of the tail that has them, counted from 1."""


ARRAYS: Final = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64"),
        *("int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""NumPy's dtypes by torch's names. Data of these are read without torch, whose import
takes seconds."""


def dtype_of(name: Any) -> "torch.dtype":
    """Return the dtype of a name such as ``"float32"``."""
    import torch

    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise DatasetError(f"{name!r} is not a dtype of torch.")
    return dtype


@final
@dataclass(frozen=True)
class KeyField:
    """One key of the batches; ``shape`` is the shape of one frame."""

    key: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Return the field as JSON values."""
        return {"key": self.key, "shape": self.shape, "dtype": self.dtype}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return (ARRAYS.get(self.dtype) or dtype_of(self.dtype)).itemsize

    @property
    def is_float(self) -> bool:
        """Whether the numbers are floating-point."""
        known = ARRAYS.get(self.dtype)
        return known.kind == "f" if known else dtype_of(self.dtype).is_floating_point


@final
class Layout:
    """Where each key of a batch is stored.

    Small keys are in the records. A key under ``next`` that usually has the root value
    of the following frame is in the tails, which only exist for frames where one such
    key differs.

    Attributes:
        packed: keys whose frames are stored one by one; ``RECORDS`` is first if the
            records are packed too.
        follows: keys in the tails.
        records: bytes of a record, by key.
        tails: bytes of a tail, by key.
        is_new: whether no batch was encoded yet.
        record: how records are stored; known once there is a batch.
        tail: how tails are stored; likewise.
    """

    def __init__(
        self,
        keys: Sequence[KeyField],
        packed: Iterable[Key],
        follows: Iterable[Key],
        record: RecordLayout | None = None,
        tail: RecordLayout | None = None,
    ) -> None:
        """Place the keys."""
        self.keys = keys
        self.packed = tuple(packed)
        self.follows = tuple(follows)
        apart = {*self.packed, *self.follows}
        self.records, self.record_size = _placed(
            (item for item in keys if item.key not in apart), TAIL
        )
        self.tails, self.tail_size = _placed(
            (item for item in keys if item.key in self.follows), 0
        )
        self.is_new = record is None
        self.record = record or NOTHING
        self.tail = tail or NOTHING

    @property
    def stored_record(self) -> int:
        """Bytes of a record in the part of a batch that has the records."""
        return 0 if RECORDS in self.packed else self.record.size

    def packing_records(self) -> "Layout":
        """Return the layout with packed records."""
        packed = (RECORDS, *self.packed)
        return Layout(self.keys, packed, self.follows, self.record, self.tail)

    def fitting(self, record: RecordLayout, tail: RecordLayout) -> "Layout":
        """Return this layout, or one for other contents too."""
        record = self._fitting(self.records, self.record, record)
        tail = self._fitting(self.tails, self.tail, tail)
        if record is self.record and tail is self.tail:
            return self
        return Layout(self.keys, self.packed, self.follows, record, tail)

    def _fitting(
        self,
        positions: Mapping[Key, tuple[int, int]],
        current: RecordLayout,
        needed: RecordLayout,
    ) -> RecordLayout:
        """Return the current layout of records or tails, or a wider one."""
        wide = np.ones(len(needed.kind), np.bool_)
        for item in self.keys:
            if item.key not in positions:
                continue
            begin, end = positions[item.key]
            wide[begin:end] = item.itemsize > 1
            if item.is_float:
                needed = needed.widened(begin, end, item.itemsize)
            elif item.key == TRAJ_IDS and self.is_new:
                needed = needed.widened(begin, begin + _COUNTER, _COUNTER)
        return needed if self.is_new else current.joined(needed, wide)

    @property
    def placement(self) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """Equal for layouts with the same keys in the same parts of a batch."""
        return self.packed, self.follows

    def equals(self, other: "Layout") -> bool:
        """Return whether a batch of one layout can be read with the other."""
        return (
            self.placement == other.placement
            and self.record.equals(other.record)
            and self.tail.equals(other.tail)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        return {
            "packs_records": RECORDS in self.packed,
            "packed": [key for key in self.packed if key != RECORDS],
            "follows": self.follows,
            "record": self.record.to_json(),
            "tail": self.tail.to_json(),
        }

    @classmethod
    def from_json(cls, keys: Sequence[KeyField], data: Mapping[str, Any]) -> "Layout":
        """Return the layout from the output of ``to_json``, and check it."""
        by_key = {item.key: item for item in keys}
        packed, follows = (
            tuple(map(key_of, data[name])) for name in ("packed", "follows")
        )
        placed = cls(keys, packed, follows)
        if data["packs_records"]:
            packed = (RECORDS, *packed)
        for key in (*packed, *follows):
            if key not in by_key and key != RECORDS:
                raise DatasetError(f"A layout has the unknown key {key!r}.")
        for key in follows:
            if root_of(by_key[key], by_key.values()) not in placed.records:
                raise DatasetError(
                    f"{key!r} has no root key of its shape in the records."
                )
        return cls(
            keys,
            packed,
            follows,
            RecordLayout.from_json(data["record"], placed.record_size),
            RecordLayout.from_json(data["tail"], placed.tail_size),
        )


def _placed(
    items: Iterable[KeyField], end: int
) -> tuple[dict[Key, tuple[int, int]], int]:
    """Place keys one behind the other; return the bytes of each, and the last end."""
    positions = {}
    for item in items:
        positions[item.key] = end, end + item.nbytes
        end += item.nbytes
    return positions, end


@final
@dataclass(frozen=True)
class BatchEntry:
    """One complete batch; it is a range of consecutive bytes of a segment.

    Attributes:
        run: index of the run that wrote it.
        shape: ``[B, T]``.
        frames: number of valid frames.
        episodes: number of episodes that ended in it.
        episode_frames: sum of these episodes' lengths.
        return_sums: sum of these episodes' returns, per agent, by group.
        layout: of its keys.
        segment: number of the file.
        offset: of its first byte in the file.
        tails: number of its tails.
        packed: codec, and bytes of all stored frames, of each packed key.
        notes: bytes of its compressed episodes and ranges.
        checksum: CRC-32 of all that is in front of the packed frames.
    """

    run: int
    shape: tuple[int, int]
    frames: int
    episodes: int
    episode_frames: int
    return_sums: Mapping[str, tuple[float, ...]]
    layout: Layout
    segment: int
    offset: int
    tails: int
    packed: tuple[tuple[str, int], ...]
    notes: int
    checksum: int

    @property
    def count(self) -> int:
        """Number of frames, valid or not."""
        return self.shape[0] * self.shape[1]

    @property
    def tails_at(self) -> int:
        """Position in the file of the first tail; the records are at ``offset``."""
        return self.offset + self.count * self.layout.stored_record

    @property
    def tables_at(self) -> int:
        """Position of the first table of a packed key."""
        return self.tails_at + self.tails * self.layout.tail.size

    @property
    def notes_at(self) -> int:
        """Position of the notes."""
        return self.tables_at + self.count * ENTRY * len(self.layout.packed)

    @cached_property
    def packed_at(self) -> int:
        """Position of the first packed frame."""
        return self.notes_at + self.notes

    @cached_property
    def end(self) -> int:
        """Position behind the batch."""
        return self.packed_at + sum(size for _, size in self.packed)

    def to_json(self, layout: int) -> dict[str, Any]:
        """Return the entry as JSON values, with the number of its layout."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return values | {"layout": layout}


@final
@dataclass(frozen=True)
class Totals:
    """Sums over a dataset, or over the batches of a writer.

    Attributes:
        frames: number of frames in all batches.
        nbytes: size of all tensors in memory.
        episodes: number of episodes that ended.
        episode_frames: sum of these episodes' lengths.
        return_sums: sum of these episodes' returns, per agent, by group.
    """

    frames: int = 0
    nbytes: int = 0
    episodes: int = 0
    episode_frames: int = 0
    return_sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def mean_length(self) -> float | None:
        """Mean length of the episodes, in frames; None if none has ended."""
        return self.episode_frames / self.episodes if self.episodes else None

    @property
    def mean_returns(self) -> dict[str, tuple[float, ...]]:
        """Mean return of each agent, by group; empty if no episode has ended."""
        if not self.episodes:
            return {}
        return {
            name: tuple(total / self.episodes for total in sums)
            for name, sums in self.return_sums.items()
        }

    @property
    def mean_team_return(self) -> float | None:
        """Mean over episodes of the sum over agents; None if none has ended."""
        return sum(map(sum, self.mean_returns.values())) if self.episodes else None

    def plus(self, entry: BatchEntry, frame: int) -> "Totals":
        """Return the totals with a batch whose frames have ``frame`` bytes each."""
        sums = dict(self.return_sums)
        for name, returns in entry.return_sums.items():
            before = sums.get(name, (0.0,) * len(returns))
            sums[name] = tuple(map(sum, zip(before, returns, strict=True)))
        return Totals(
            self.frames + entry.frames,
            self.nbytes + entry.count * frame,
            self.episodes + entry.episodes,
            self.episode_frames + entry.episode_frames,
            sums,
        )


@final
class Index:
    """What a dataset or an export holds: the content of a journal.

    Attributes:
        description: task, groups and spaces.
        metadata: author, license and the like.
        runs: the runs, in the order in which they began.
        keys: of the batches; empty before the first one.
        frame_bytes: bytes of a frame in memory.
        ragged: whether a mask tells which frames are valid; otherwise all are.
        rewards: groups with rewards, each with its number of agents.
        roots: by key, the root key that it repeats one frame later, if there is one.
        layouts: of the batches.
        batches: in the order of writing.
        listed: for each batch, the bytes of the journal including its line.
        totals: over all batches.
        size: bytes of the journal.
        checksum: of its last line.
    """

    def __init__(
        self,
        description: DatasetDescription,
        runs: Iterable[RunDescription] = (),
        keys: tuple[KeyField, ...] = (),
        metadata: Metadata | None = None,
    ) -> None:
        """Begin without a batch."""
        self.size = self.checksum = 0
        self.description = description
        self.metadata = metadata or Metadata()
        self.runs = list(runs)
        self.set_keys(keys)
        self.layouts: list[Layout] = []
        self.batches: list[BatchEntry] = []
        self.listed: list[int] = []
        self.totals = Totals()

    def set_keys(self, keys: tuple[KeyField, ...]) -> None:
        """Set the keys of the batches, and what follows from them."""
        self.keys = keys
        self.frame_bytes = sum(item.nbytes for item in keys)
        self.ragged = any(item.key == VALID for item in keys)
        self.rewards = {
            item.key[1]: item.shape[0]
            for item in keys
            if len(item.key) == 3 and item.key[::2] == ("next", "reward")
        }
        roots = {item.key: root_of(item, keys) for item in keys}
        self.roots = {key: root for key, root in roots.items() if root is not None}

    def difference(self, other: "Index") -> tuple[str, Any, Any] | None:
        """Return what prevents batches of another index here; None if nothing does.

        Returns:
            The first setting, space or key that differs, its value here, and there.
        """
        first, second = self.description.to_json(), other.description.to_json()
        different = difference(first, second)
        if different is None and self.keys and other.keys:  # None without batches.
            return key_difference(self.keys, other.keys)
        return different

    def run_frames(self, run: int) -> int:
        """Return the number of frames that a run has written."""
        return sum(entry.frames for entry in self.batches if entry.run == run)

    def new_versions(self, run: int) -> str:
        """Return the versions of a run that differ from the run before, as a text."""
        before = self.runs[run - 1].versions if run else {}
        versions = self.runs[run].versions.items()
        return ", ".join(f"{k} {v}" for k, v in versions if before.get(k) != v)

    @property
    def ends(self) -> dict[int, int]:
        """Bytes of each segment that are listed."""
        return {entry.segment: entry.end for entry in self.batches}

    @property
    def digests(self) -> dict[int, str]:
        """For each segment, a text that is different for other content."""
        sums: dict[int, list[str]] = {}
        for entry in self.batches:
            text = f"{entry.end} {entry.checksum:08x}"
            sums.setdefault(entry.segment, []).append(text)
        return {segment: " ".join(texts) for segment, texts in sums.items()}

    def take(self, entry: Mapping[str, Any], size: int, checksum: int) -> None:
        """Add an entry of the journal, and check it.

        Args:
            entry: JSON values.
            size: bytes of the journal including its line.
            checksum: of its line.

        Raises:
            DatasetError: if it contradicts the entries before it.
        """
        (kind,) = entry
        data = entry[kind]
        if kind == "run":
            self.runs.append(RunDescription.from_json(data))
        elif kind == "metadata":
            self.metadata = Metadata.from_json(data)
        elif kind == "keys" and not self.keys:
            self.set_keys(keys_from_json(data))
        elif kind == "layout" and self.keys:
            self.layouts.append(Layout.from_json(self.keys, data))
        elif kind == "batch":
            self.add(_batch(data, self), size, checksum)
        else:
            raise DatasetError(f"An entry {kind!r} is in the wrong place.")
        self.size, self.checksum = size, checksum

    def add(self, entry: BatchEntry, size: int, checksum: int) -> None:
        """Add a batch with the last or a later run, behind the batch before it.

        Args:
            entry: of the batch.
            size: bytes of the journal including its line.
            checksum: of its line.

        Raises:
            DatasetError: if it is somewhere else.
        """
        last = self.batches[-1] if self.batches else None
        ended = (last.segment, last.end) if last else (-1, 0)
        # A batch begins where the one before it ended, or a new file.
        if (entry.segment, entry.offset) not in (ended, (ended[0] + 1, 0)):
            raise DatasetError(
                f"Batch {len(self.batches)} does not begin where the one before it "
                "ended: a line was removed or changed."
            )
        if last and entry.run < last.run:
            raise DatasetError(
                f"Batch {len(self.batches)} is of an earlier run than the one before."
            )
        if entry.end > _LARGEST_FILE:
            raise DatasetError(f"Batch {len(self.batches)} is impossibly large.")
        if entry.return_sums.keys() != self.rewards.keys():
            raise DatasetError("The groups with returns are not those with rewards.")
        self.batches.append(entry)
        self.listed.append(size)
        self.totals = self.totals.plus(entry, self.frame_bytes)
        self.size, self.checksum = size, checksum

    @classmethod
    def parse(cls, content: bytes) -> "Index":
        """Return the index of a journal, and check that its entries are consistent.

        Raises:
            Exception: if it is damaged or no journal, or has another version.
        """
        lines = _journal_lines(content)
        header, size, checksum = next(lines, ({}, 0, 0))
        if header.get("format") != FORMAT:
            raise DatasetError("it does not begin with the description of a dataset.")
        if header["format_version"] != VERSION:
            raise DatasetError(
                f"this is format version {header['format_version']}, but this version "
                f"of marl_collect reads version {VERSION}. Install a newer one."
            )
        index = cls(DatasetDescription.from_json(header))
        index.size, index.checksum = size, checksum
        for entry, size, checksum in lines:
            index.take(entry, size, checksum)
        return index

    @classmethod
    def load(cls, folder: Folder) -> "Index":
        """Read the journal, and check that its entries are consistent.

        Raises:
            FileNotFoundError: if the folder holds no dataset.
            DatasetError: if the file is no journal, is damaged, or is of another
                version. It names the file.
        """
        if not folder.has(JOURNAL):
            if Path(folder.named()).is_file():
                raise FileNotFoundError(
                    f"{folder.named()} is a file, but a dataset is a folder. "
                    "`marl-collect import` makes one from files of other formats."
                )
            raise FileNotFoundError(
                f"{folder.named()} holds no dataset: there is no {JOURNAL} in it. "
                "`marl-collect view` lists the datasets and runs below a folder."
            )
        content = folder.read(JOURNAL)
        with naming(folder.named(JOURNAL), "the journal of a dataset"):
            return cls.parse(content)


def join_indexes(indexes: Sequence[Index]) -> Index:
    """Return one index with the runs and batches of all, for reading only."""
    if len(indexes) == 1:
        return indexes[0]
    joined = Index(indexes[0].description)
    for index in indexes:
        runs = len(joined.runs)
        joined.set_keys(joined.keys or index.keys)
        joined.runs += index.runs
        if joined.metadata == Metadata():
            joined.metadata = index.metadata
        for entry in index.batches:
            joined.batches.append(replace(entry, run=entry.run + runs))
            joined.totals = joined.totals.plus(entry, index.frame_bytes)
    return joined


def _journal_lines(content: bytes) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield each entry, the position behind its line, and its checksum."""
    end = checksum = 0
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        checksum = zlib.crc32(line[9:], checksum)
        if line[:9] != b"%08x " % checksum:
            raise DatasetError(
                f"line {number} is damaged or was changed: its checksum is wrong. "
                "Restore the file from a copy."
            )
        end += len(line) + 1
        yield json.loads(line[9:]), end, checksum


def journal_line(entry: Mapping[str, Any], checksum: int) -> tuple[bytes, int]:
    """Return a line of the journal, and its checksum.

    Args:
        entry: JSON values.
        checksum: of the line before it; 0 for the first one.
    """
    text = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode()
    checksum = zlib.crc32(text, checksum)
    return b"%08x %s\n" % (checksum, text), checksum


def first_line(description: DatasetDescription) -> bytes:
    """Return the first line of the journal of a dataset."""
    header = {"format": FORMAT, "format_version": VERSION} | description.to_json()
    return journal_line(header, 0)[0]


def root_of(item: KeyField, keys: Collection[KeyField]) -> Key | None:
    """Return the root key that ``item`` repeats one frame later, if there is one."""
    if item.key[0] != "next":
        return None
    root = KeyField(item.key[1:], item.shape, item.dtype)
    return root.key if root in keys else None


def key_difference(
    expected: Sequence[KeyField], actual: Sequence[KeyField]
) -> tuple[str, str, str] | None:
    """Return the first key that differs, and both of its shapes; None if none does."""
    before, after = (
        {item.key: f"{list(item.shape)} {item.dtype}" for item in keys}
        for keys in (expected, actual)
    )
    different = difference(before, after)
    if different is None:
        return None
    key, there, here = different
    return "/".join(key), there or "missing", here or "missing"


def keys_from_json(data: Any) -> tuple[KeyField, ...]:
    """Return the keys from their JSON values, and check them."""
    keys = tuple(
        KeyField(key_of(item["key"]), shape_of(item["shape"]), item["dtype"])
        for item in data
    )
    names = {item.key for item in keys}
    nodes = {item.key[:end] for item in keys for end in range(1, len(item.key))}
    if len(names) != len(keys) or names & nodes:
        raise DatasetError("A key is listed twice, or lies below another one.")
    for item in keys:
        sizes = [size for size in item.shape if size]
        if math.prod(sizes) * item.itemsize > _LARGEST_FRAME:
            raise DatasetError(
                f"A frame of {'/'.join(item.key)} has the shape {list(item.shape)}, "
                f"which is more than {_LARGEST_FRAME:,} bytes."
            )
    return keys


def _batch(data: Mapping[str, Any], index: Index) -> BatchEntry:
    """Check an entry of a batch."""
    size, frames = shape_of(data["shape"])
    if size * frames > _LARGEST_BATCH:
        raise DatasetError(f"A batch has the impossible shape [{size}, {frames}].")
    entry = BatchEntry(
        integer(data, "run", below=len(index.runs)),
        (size, frames),
        integer(data, "frames", below=size * frames + 1),
        integer(data, "episodes", below=size * frames + 1),
        integer(data, "episode_frames"),
        {name: numbers(sums) for name, sums in data["return_sums"].items()},
        index.layouts[integer(data, "layout", below=len(index.layouts))],
        integer(data, "segment"),
        integer(data, "offset"),
        integer(data, "tails", below=size * frames + 1),
        tuple((codec, integer({"bytes": n}, "bytes")) for codec, n in data["packed"]),
        integer(data, "notes"),
        integer(data, "checksum"),
    )
    if not index.ragged and entry.frames != entry.count:
        raise DatasetError(
            f"A batch has {entry.frames} frames, but its shape is [{size}, {frames}]."
        )
    if not all(isinstance(codec, str) for codec, _ in entry.packed):
        raise DatasetError(f"{data['packed']!r} are not codecs and sizes.")
    if len(entry.packed) != len(entry.layout.packed):
        raise DatasetError("A batch has other packed keys than its layout.")
    return entry
