"""Reads frames and episodes of a folder of Parquet files by their numbers."""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.core.description import Key
from marl_collect.core.tensordicts import assemble, key_path
from marl_collect.processes.cgroups import free_memory
from marl_collect.storage.checks import DatasetError, naming
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EpisodeTable
from marl_collect.storage.parquet.cache import Cache, cache_folder, open_cache
from marl_collect.storage.parquet.columns import Column, flat_rows, json_of
from marl_collect.storage.parquet.files import BatchFile, list_files, read_schema
from marl_collect.storage.samples import Sample
from marl_collect.storage.selection import Trajectories
from marl_collect.storage.spans import Spans, item_numbers
from marl_collect.storage.transitions import Transitions

_LISTINGS: Final = 5
"""How often files may vanish while they are read, as writers join small ones."""
_PAGE: Final = mmap.PAGESIZE


@final
@dataclass(frozen=True)
class Frames:
    """The frames of a cache, by number, or some of their keys.

    Attributes:
        name: of the dataset in messages.
        cache: what is read.
        keys: the columns that are read.
        groups: number of agents of each group.
    """

    name: str
    cache: Cache
    keys: tuple[Column, ...]
    groups: Mapping[str, int]

    @cached_property
    def _views(self) -> dict[Key, torch.Tensor]:
        """Every small key of all frames, ``[frames, ...]``: views of the records."""
        return {
            column.key: column.tensor(self.cache.records[column.name])
            for column in self.keys
            if not column.is_large
        }

    @cached_property
    def _needs_advice(self) -> bool:
        """Whether the records do not fit into memory.

        Then the kernel must not read what surrounds a frame: that would be megabytes.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
        limit = free_memory()
        memory = memory if limit is None else min(memory, limit)
        needs_advice = self.cache.records.nbytes > memory / 2
        if needs_advice:
            self.cache.map.madvise(mmap.MADV_RANDOM)
        return needs_advice

    def select(self, *keys: str | Key) -> Self:
        """Return the same frames with these keys, and those below them, only.

        Raises:
            KeyError: if a key does not exist.
        """
        wanted = [key_path(key) for key in keys]
        for key in wanted:
            if not any(column.key[: len(key)] == key for column in self.keys):
                names = ", ".join("/".join(column.key) for column in self.keys)
                raise KeyError(
                    f"There is no key {'/'.join(key)} in {self.name}; it has {names}."
                )
        chosen = (
            column
            for column in self.keys
            if any(column.key[: len(key)] == key for key in wanted)
        )
        return replace(self, keys=tuple(chosen))

    def only(self, key: Key) -> Self:
        """Return the same frames with one key, whether it is selected or not."""
        chosen = (column for column in self.cache.columns if column.key == key)
        return replace(self, keys=tuple(chosen))

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.cache.records)

    def in_group(self, key: Key) -> bool:
        """Return whether a root key is of the agents of a group."""
        return key[0] in self.groups

    def read(self, numbers: NDArray[np.int64]) -> dict[Key, torch.Tensor]:
        """Copy frames: each key ``[n, ...]``, in the order of ``numbers``.

        Raises:
            DatasetError: if a large frame is damaged in the cache.
        """
        if self._needs_advice:
            self._advise(numbers)
        index = torch.from_numpy(np.ascontiguousarray(numbers))
        content = {key: view[index] for key, view in self._views.items()}
        for column in self.keys:
            if column.is_large:
                content[column.key] = self._large(column, numbers)
        return {column.key: content[column.key] for column in self.keys}

    def arrays(self, numbers: NDArray[np.int64]) -> dict[Key, NDArray[Any]]:
        """Copy frames as ``read`` does, as arrays; float32 instead of bfloat16."""
        return {
            key: (tensor.float() if _is_unknown(tensor.dtype) else tensor).numpy()
            for key, tensor in self.read(numbers).items()
        }

    def nested(
        self,
        tensors: Mapping[Key, torch.Tensor],
        shape: Sequence[int],
        *,
        time: bool = True,
    ) -> TensorDict:
        """Return tensors ``[prod(shape), ...]`` as a TensorDict of that shape.

        Args:
            tensors: by key.
            shape: batch size.
            time: whether the last dimension is time.
        """
        shaped = {key: t.view(*shape, *t.shape[1:]) for key, t in tensors.items()}
        return assemble(shaped, shape, self.groups, time=time, kind=Sample)

    def _large(self, column: Column, numbers: NDArray[np.int64]) -> torch.Tensor:
        out = np.empty((len(numbers), *column.shape), column.stored)
        spans = self.cache.records[column.name][numbers]
        rows: dict[tuple[int, int], int] = {}
        for row, span in enumerate(map(tuple, spans.tolist())):
            # A frame is often read as the next one of the frame before it, too.
            first = rows.setdefault(span, row)
            if first == row:
                self.cache.large_frame(span, out[row])
            else:
                out[row] = out[first]
        return column.tensor(out)

    def _advise(self, numbers: NDArray[np.int64]) -> None:
        """Ask the kernel for the pages of all frames at once."""
        size = self.cache.records.dtype.itemsize
        for number in np.unique(numbers).tolist():
            begin = number * size // _PAGE * _PAGE
            self.cache.map.madvise(
                mmap.MADV_WILLNEED, begin, (number + 1) * size - begin
            )


@final
@dataclass(frozen=True)
class Contents:
    """What a dataset says of itself.

    Attributes:
        description: what all its batches have in common.
        runs: the run of each number.
        keys: of its frames.
    """

    description: DatasetDescription
    runs: tuple[RunDescription, ...]
    keys: tuple[Column, ...]


@final
class ParquetDataset:
    """The frames of a folder, in the order of its runs.

    Open one with ``open_parquet``.

    Attributes:
        path: the folder.
        files: as of opening.
        frames: all frames.
        contents: description, runs and keys.
    """

    def __init__(self, path: Path, files: Sequence[BatchFile], cache: Cache) -> None:
        """Map a cache; reads the descriptions from the files."""
        self.path, self.files = path, tuple(files)
        firsts: dict[str, BatchFile] = {}
        for file in files:
            firsts.setdefault(file.run, file)
        texts = {run: _about(file) for run, file in firsts.items()}
        description = next(iter(texts.values()))[0]
        runs = tuple(texts[run][1] for run in cache.runs if run in texts)
        if len(runs) != len(cache.runs):
            raise DatasetError(
                f"{path} has frames of the runs {', '.join(cache.runs)}, but files of "
                f"{', '.join(texts)}: a file was renamed."
            )
        self.contents = Contents(description, runs, cache.columns)
        groups = description.environment.groups
        agents = {name: group.n_agents for name, group in groups.items()}
        self.frames = Frames(str(path), cache, cache.columns, agents)

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.frames)

    def __getitem__(self, numbers: Any) -> TensorDict:
        """Copy frames by their numbers, ``[n]``.

        Raises:
            IndexError: if a number is out of range.
        """
        chosen = item_numbers(numbers, len(self), "frame").reshape(-1)
        return self.frames.nested(self.frames.read(chosen), [len(chosen)], time=False)

    @cached_property
    def transitions(self) -> Transitions:
        """All frames, including those of episodes that did not end."""
        bounds = np.zeros(1, np.int64), np.array([len(self)], np.int64)
        # It has the methods of StoredFrames that are used.
        return Transitions(cast("Any", self.frames), Spans(*bounds, np.arange(2)))

    @cached_property
    def trajectories(self) -> Trajectories:
        """The complete episodes."""
        cache = self.frames.cache
        table, spans = episodes_of(cache, self.frames.groups)
        runs = cache.episodes["run"].astype(np.int64)
        frames, contents = cast("Any", self.frames), cast("Any", self.contents)
        return Trajectories(frames, contents, table, spans, runs)

    def __repr__(self) -> str:
        """Return the path, the task and the sizes."""
        return (
            f"ParquetDataset({str(self.path)!r}, "
            f"task={self.contents.description.task!r}, {len(self)} frames, "
            f"{len(self.frames.cache.episodes)} episodes)"
        )


def open_parquet(path: str | Path, cache: str | Path | None = None) -> ParquetDataset:
    """Open a dataset; decodes what the cache lacks.

    Args:
        path: folder of the dataset.
        cache: folder of decoded frames. None: ``.cache`` in the dataset's folder if it
            can be written, else one in ``$XDG_CACHE_HOME``.

    Raises:
        FileNotFoundError: if the folder does not exist or has no batches.
        NotADirectoryError: if it is a file.
        DatasetError: if a file is damaged or missing; names it.
        OSError: if the cache cannot be written.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        kind = NotADirectoryError if folder.exists() else FileNotFoundError
        raise kind(f"{folder} is not a folder of a dataset.")
    for attempt in range(1, _LISTINGS + 1):
        files = list_files(folder)
        if not files:
            raise FileNotFoundError(f"{folder} has no batches of a dataset.")
        try:
            mapped = open_cache(files, Path(cache) if cache else cache_folder(folder))
            return ParquetDataset(folder, files, mapped)
        except FileNotFoundError as error:
            if attempt == _LISTINGS:
                raise DatasetError(
                    f"The files of {folder} vanish while they are read ({error}). Try "
                    "again when nobody changes them."
                ) from error
    raise AssertionError


def episodes_of(cache: Cache, groups: Iterable[str]) -> tuple[EpisodeTable, Spans]:
    """Return the complete episodes of a cache, and their frames."""
    episodes = cache.episodes
    names = {column.key: column.name for column in cache.columns}
    returns = {
        group: flat_rows(episodes[names["next", group, "reward"]])
        for group in groups
        if ("next", group, "reward") in names
    }
    first, length = episodes["first"], episodes["length"]
    last = np.asarray(cache.order)[first + length - 1]
    table = EpisodeTable(
        episodes["traj_id"] >> 32, last, length, episodes["terminated"], returns
    )
    # Where the numbers of an episode's frames do not follow each other, a span begins.
    at = np.repeat(first - np.cumsum(length) + length, length) + np.arange(length.sum())
    numbers = np.asarray(cache.order)[at]
    starts = np.append(0, np.cumsum(length))
    begins = np.ones(len(numbers), np.bool_)
    begins[1:] = numbers[1:] != numbers[:-1] + 1
    begins[starts[:-1]] = True
    where = np.flatnonzero(begins)
    ends = np.append(where[1:], len(numbers))[: len(where)] - 1
    spans = Spans(numbers[where], numbers[ends] + 1, np.searchsorted(where, starts))
    return table, spans


def _about(file: BatchFile) -> tuple[DatasetDescription, RunDescription]:
    with naming(file.path, "a file of a dataset"):
        about = json_of(read_schema(file.path))
        return (
            DatasetDescription.from_json(about["description"]),
            RunDescription.from_json(about["run"]),
        )


def _is_unknown(dtype: torch.dtype) -> bool:
    """Return whether NumPy lacks a dtype."""
    return dtype.is_floating_point and dtype not in (
        torch.float16,
        torch.float32,
        torch.float64,
    )
