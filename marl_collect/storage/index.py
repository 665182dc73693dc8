"""The index file, which lists a dataset's complete batches and their content."""

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, final

from marl_collect.buffers.layout import VALID
from marl_collect.core.atomic import write_atomically
from marl_collect.core.description import Key
from marl_collect.storage.checks import (
    DatasetError,
    Folder,
    dtype_of,
    integer,
    key_of,
    naming,
    numbers,
    read_json,
    read_text,
    shape_of,
)
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.ranges import Range

INDEX = "index.json"
EPISODES = "episodes.json"
FILES = "files.json"
FORMAT = "marl_collect dataset"
VERSION = 2
_READABLE = (1, 2)
"""Version 1 has no checksums, and raw files only."""
WHAT = "an index of a dataset"
CHECKSUM = "checksum"
BATCH_NAME = re.compile(r"batch-[0-9]{6,}")


@final
@dataclass(frozen=True)
class KeyField:
    """One key of the batches; ``shape`` is the shape of one frame."""

    key: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@final
@dataclass(frozen=True)
class BatchEntry:
    """One complete batch.

    Attributes:
        name: of its folder.
        run: index of the run that wrote it.
        shape: ``[B, T]``.
        frames: number of valid frames.
        episodes: number of episodes that ended in it.
        nbytes: size of its tensors in memory.
        checksums: CRC-32 of its ``files.json`` and ``episodes.json``; empty if an
            earlier version wrote the batch.
    """

    name: str
    run: int
    shape: tuple[int, int]
    frames: int
    episodes: int
    nbytes: int
    checksums: Mapping[str, int] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Position in the order of writing; a gap is a missing batch."""
        return int(self.name.removeprefix("batch-"))


@final
@dataclass(frozen=True)
class Totals:
    """Sums over the whole dataset.

    Attributes:
        frames: number of frames in all batches.
        nbytes: size of all tensors.
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

    def joined(self, other: "Totals") -> "Totals":
        """Return the totals of both."""
        names = [*self.return_sums, *other.return_sums]
        sums = {}
        for name in dict.fromkeys(names):
            own = [t.return_sums[name] for t in (self, other) if name in t.return_sums]
            sums[name] = tuple(map(sum, zip(*own, strict=True)))
        return Totals(
            self.frames + other.frames,
            self.nbytes + other.nbytes,
            self.episodes + other.episodes,
            self.episode_frames + other.episode_frames,
            sums,
        )

    def plus(self, entry: BatchEntry, ended: Sequence[EndedEpisode]) -> "Totals":
        """Return the totals with one more batch."""
        sums = dict(self.return_sums)
        for episode in ended:
            for name, returns in episode.returns.items():
                before = sums.get(name, (0.0,) * len(returns))
                sums[name] = tuple(map(sum, zip(before, returns, strict=True)))
        return Totals(
            self.frames + entry.frames,
            self.nbytes + entry.nbytes,
            self.episodes + len(ended),
            self.episode_frames + sum(episode.length for episode in ended),
            sums,
        )


@final
@dataclass(frozen=True)
class Index:
    """The content of ``index.json``."""

    description: DatasetDescription
    keys: tuple[KeyField, ...] = ()
    runs: tuple[RunDescription, ...] = ()
    batches: tuple[BatchEntry, ...] = ()
    totals: Totals = field(default_factory=Totals)

    def with_run(self, run: RunDescription) -> Self:
        """Return the index with one more run."""
        return replace(self, runs=(*self.runs, run))

    def with_batch(
        self,
        entry: BatchEntry,
        keys: tuple[KeyField, ...],
        ended: Sequence[EndedEpisode],
    ) -> Self:
        """Return the index with one more batch."""
        return replace(
            self,
            keys=keys,
            batches=(*self.batches, entry),
            totals=self.totals.plus(entry, ended),
        )

    def save(self, folder: Path) -> None:
        """Write ``index.json`` atomically."""
        data = {
            "format": FORMAT,
            "format_version": VERSION,
            **self.description.to_json(),
            "totals": asdict(self.totals),
            "runs": [run.to_json() for run in self.runs],
            "keys": [asdict(key) for key in self.keys],
            "batches": [asdict(entry) for entry in self.batches],
        }
        entries = (f"{_dumps(name)}: {_lines(value)}" for name, value in data.items())
        text = "{\n" + ",\n".join(entries) + ",\n"
        write_atomically(folder / INDEX, text + _ending(text))

    @property
    def next_number(self) -> int:
        """Number of the next batch, after all listed ones."""
        return self.batches[-1].number + 1 if self.batches else 0

    @property
    def next_batch(self) -> str:
        """Name of the next batch."""
        return f"batch-{self.next_number:06d}"

    @classmethod
    def load(cls, folder: Folder) -> Self:
        """Read ``index.json``, and check that its entries are consistent.

        Raises:
            FileNotFoundError: if the folder holds no dataset.
            DatasetError: if the file is not an index, is damaged, or is of a newer
                version. It names the file.
        """
        if not folder.has(INDEX):
            raise FileNotFoundError(
                f"{folder.named()} holds no dataset: there is no {INDEX} in it."
            )
        text = read_text(folder, (INDEX,))
        with naming(folder.named(INDEX), WHAT):
            data = json.loads(text)
            _check_ending(text, data)
            return cls._parse(data)

    @classmethod
    def _parse(cls, data: Mapping[str, Any]) -> Self:
        if data["format"] != FORMAT:
            raise DatasetError(f"the format is {data['format']!r}, not {FORMAT!r}.")
        if data["format_version"] not in _READABLE:
            raise DatasetError(
                f"this is format version {data['format_version']}, but this version "
                f"of marl_collect reads versions up to {VERSION}. Install a newer one."
            )
        keys = keys_from_json(data["keys"])
        runs = tuple(RunDescription.from_json(run) for run in data["runs"])
        frame = sum(item.nbytes for item in keys)
        ragged = any(item.key == VALID for item in keys)
        batches = tuple(
            _batch(entry, frame, len(runs), ragged=ragged) for entry in data["batches"]
        )
        for before, after in pairwise(batches):
            if after.number <= before.number or after.run < before.run:
                raise DatasetError(f"{after.name} is listed after {before.name}.")
        return cls(
            DatasetDescription.from_json(data),
            keys,
            runs,
            batches,
            _totals(data["totals"], batches),
        )


def join_indexes(indexes: Sequence[Index]) -> Index:
    """Return one index with the runs and batches of all; names of batches repeat."""
    first, *others = indexes
    for other in others:
        runs = len(first.runs)
        first = Index(
            first.description,
            first.keys or other.keys,
            (*first.runs, *other.runs),
            (
                *first.batches,
                *(replace(entry, run=entry.run + runs) for entry in other.batches),
            ),
            first.totals.joined(other.totals),
        )
    return first


def key_difference(
    expected: Sequence[KeyField], found: Sequence[KeyField]
) -> tuple[str, str, str] | None:
    """Return the first key that differs, and both of its shapes; None if none does."""
    before = {field.key: field for field in expected}
    after = {field.key: field for field in found}
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            return "/".join(key), _shown(before.get(key)), _shown(after.get(key))
    return None


def _shown(field: KeyField | None) -> str:
    return "missing" if field is None else f"{list(field.shape)} {field.dtype}"


def episodes_to_json(episodes: Sequence[EndedEpisode]) -> str:
    """Return the content of a batch's ``episodes.json``."""
    return json.dumps([asdict(episode) for episode in episodes])


def read_episodes(folder: Folder, entry: BatchEntry) -> list[EndedEpisode]:
    """Read the episodes that ended in a batch.

    Raises:
        DatasetError: if ``episodes.json`` is missing, damaged, or does not fit the
            index. It names the file.
    """
    parts = (entry.name, EPISODES)
    path = folder.named(*parts)
    data = read_json(folder, parts, "a list of episodes", entry.checksums.get(EPISODES))
    with naming(path, "a list of episodes"):
        found = [_episode(item, entry) for item in data]
    places = {(episode.environment, episode.frame) for episode in found}
    if len(places) != len(found) or len(found) != entry.episodes:
        raise DatasetError(
            f"{path} lists {len(places)} different episodes, but the "
            f"index says {entry.episodes}."
        )
    return found


@final
@dataclass(frozen=True)
class StoredFile:
    """How the tensor of one key of a batch is stored.

    Attributes:
        codec: name of the codec of a packed file; None for raw numbers.
        nbytes: size of the file.
        checksum: CRC-32 of raw numbers, or of the header of a packed file.
        range: of the values in valid frames; None if an earlier version did not note
            it.
    """

    codec: str | None
    nbytes: int
    checksum: int
    range: Range | None = None


def files_to_json(files: Mapping[Key, StoredFile]) -> str:
    """Return the content of a batch's ``files.json``."""
    found = []
    for key, file in files.items():
        item = {"key": key, "codec": file.codec, "nbytes": file.nbytes}
        item |= {"checksum": file.checksum}
        if file.range is not None:
            item |= file.range.to_json()
        found.append(item)
    return json.dumps(found, allow_nan=False)


def read_files(folder: Folder, entry: BatchEntry) -> dict[Key, StoredFile]:
    """Read how the tensors of a batch are stored; empty if an earlier version did it.

    Raises:
        DatasetError: if ``files.json`` is missing or damaged. It names the file.
    """
    if FILES not in entry.checksums:
        return {}
    parts = (entry.name, FILES)
    data = read_json(folder, parts, "a list of files", entry.checksums[FILES])
    with naming(folder.named(*parts), "a list of files"):
        return {
            key_of(item["key"]): StoredFile(
                item["codec"],
                integer(item, "nbytes"),
                integer(item, "checksum"),
                Range.from_json(item) if "nans" in item else None,
            )
            for item in data
        }


def _ending(text: str) -> str:
    return f'"{CHECKSUM}": "{zlib.crc32(text.encode()):08x}"\n}}\n'


def _check_ending(text: str, data: Mapping[str, Any]) -> None:
    """Check that nothing before the checksum was changed."""
    if data["format_version"] != VERSION or data[CHECKSUM] is None:
        return
    begin = text.rfind(f'"{CHECKSUM}"')
    if text[begin:] != _ending(text[:begin]):
        raise DatasetError(
            "its checksum is wrong: it was damaged or changed by hand. Restore it from "
            f'a copy. If you changed it on purpose, set "{CHECKSUM}" to null.'
        )


def _lines(value: object) -> str:
    """Return JSON with one line per list entry, for readable diffs."""
    if isinstance(value, list) and value:
        return "[\n " + ",\n ".join(map(_dumps, value)) + "\n]"
    return _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False)


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
        dtype_of(item.dtype)
    return keys


def _batch(
    data: Mapping[str, Any], frame: int, runs: int, *, ragged: bool
) -> BatchEntry:
    """Check an entry; ``frame`` is the number of bytes of one frame."""
    name = data["name"]
    if not isinstance(name, str) or not BATCH_NAME.fullmatch(name):
        # The name becomes part of a path.
        raise DatasetError(f"A batch is named {name!r}, not batch-NNNNNN.")
    size, frames = shape_of(data["shape"])
    entry = BatchEntry(
        name,
        integer(data, "run", below=runs),
        (size, frames),
        integer(data, "frames", below=size * frames + 1),
        integer(data, "episodes", below=size * frames + 1),
        integer(data, "nbytes"),
        {n: integer(data["checksums"], n) for n in data.get("checksums", ())},
    )
    if not ragged and entry.frames != size * frames:
        raise DatasetError(
            f"{name} has {entry.frames} frames, but its shape is [{size}, {frames}]."
        )
    nbytes = size * frames * frame
    if entry.nbytes != nbytes:
        raise DatasetError(
            f"{name} has {entry.nbytes:,} bytes, but its shape and keys require "
            f"{nbytes:,}."
        )
    return entry


def _totals(data: Mapping[str, Any], batches: Sequence[BatchEntry]) -> Totals:
    totals = Totals(
        integer(data, "frames"),
        integer(data, "nbytes"),
        integer(data, "episodes"),
        integer(data, "episode_frames"),
        {name: numbers(sums) for name, sums in data["return_sums"].items()},
    )
    for name in ("frames", "nbytes", "episodes"):
        found = sum(getattr(entry, name) for entry in batches)
        if getattr(totals, name) != found:
            raise DatasetError(
                f"totals has {getattr(totals, name):,} {name}, but the listed batches "
                f"have {found:,}. Was an entry removed or changed by hand?"
            )
    return totals


def _episode(data: Mapping[str, Any], entry: BatchEntry) -> EndedEpisode:
    size, frames = entry.shape
    terminated = data["terminated"]
    if type(terminated) is not bool:
        raise DatasetError(f"terminated is {terminated!r}, not true or false.")
    length = integer(data, "length")
    if not length:
        raise DatasetError("An episode has no frames.")
    return EndedEpisode(
        integer(data, "environment", below=size),
        integer(data, "frame", below=frames),
        length,
        terminated,
        {name: numbers(values) for name, values in data["returns"].items()},
    )
