"""Opens a dataset as a list of TensorDicts; batches are read when they are used."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, overload

from marl_collect.options import method
from marl_collect.programs import notebooks
from marl_collect.storage.card import card
from marl_collect.storage.checks import Folder
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.frames import StoredFrames, segment_name
from marl_collect.storage.index import Index, join_indexes
from marl_collect.storage.loading import Loader, LoaderArguments
from marl_collect.storage.remote import RemoteFolder, open_folder
from marl_collect.storage.selection import Trajectories
from marl_collect.storage.spans import item_numbers
from marl_collect.storage.statistics import Statistics
from marl_collect.storage.transitions import Transitions

if TYPE_CHECKING:
    from tensordict import TensorDict


@final
class Dataset(Sequence["TensorDict"]):
    """The complete batches of a folder, in the order in which they were written.

    ``dataset[i]`` is the batch ``[B, T]``, in new memory.
    Open a dataset with ``open_dataset``; ``concatenate`` makes one of several folders.

    Attributes:
        parts: its folders, each with its index as of opening; several after
            ``concatenate``.
        name: its folders in one line.
        contents: description, runs, totals and list of batches, as of opening.
    """

    def __init__(self, parts: Sequence[tuple[Folder, Index]]) -> None:
        """Prepare reading; the parts must be of one kind."""
        self.parts = tuple(parts)
        self.name = ", ".join(folder.named() for folder, _ in self.parts)
        self.contents = join_indexes([index for _, index in self.parts])

    @cached_property
    def _frames(self) -> StoredFrames:
        return StoredFrames(self.name, self.parts)

    @property
    def path(self) -> Path:
        """The folder on this machine.

        Raises:
            ValueError: if the dataset has several folders, or is in an object store.
        """
        if len(self.parts) != 1:
            raise ValueError(
                f"This dataset has {len(self.parts)} folders, not one: {self.name}."
            )
        ((folder, _),) = self.parts
        if isinstance(folder, RemoteFolder):
            raise ValueError(  # noqa: TRY004 - not a type
                f"{self.name} is not on this machine: copy it with `marl-collect copy`."
            )
        return folder.path

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.contents.batches)

    @overload
    def __getitem__(self, index: int) -> "TensorDict": ...

    @overload
    def __getitem__(self, index: slice) -> "list[TensorDict]": ...

    def __getitem__(self, index: int | slice) -> "TensorDict | list[TensorDict]":
        """Read a batch, or several.

        Raises:
            DatasetError: if a file is missing, damaged or a link. It names the file.
            IndexError: if there is no such batch.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch = int(item_numbers(operator.index(index), len(self), "batch"))
        tensors = self._frames.read(self._frames.frames(batch))
        return self._frames.nested(tensors, self.contents.batches[batch].shape)

    def episodes(self, batch: int | None = None) -> Iterator[EndedEpisode]:
        """Yield the episodes that ended in all batches, or in one batch.

        Raises:
            DatasetError: if a file is damaged.
        """
        batches = range(len(self)) if batch is None else [range(len(self))[batch]]
        for number in batches:
            yield from self._frames.episodes(number)

    @cached_property
    def statistics(self) -> Statistics:
        """Returns, lengths and the range of each key; reads no frames."""
        ranges = map(self._frames.ranges, range(len(self)))
        return Statistics.of(self._frames.all_episodes(), ranges)

    def card(self) -> str:
        """Return what the dataset holds and how to load it, as Markdown."""
        return card(self.contents, self.statistics)

    def verify(self, batch: int | None = None) -> None:
        """Read all batches, or one of them, and compare every checksum.

        Raises:
            DatasetError: if one is missing, damaged or a link. It names the file.
        """
        batches = range(len(self)) if batch is None else [range(len(self))[batch]]
        for number in batches:
            self._frames.verify(number)

    def stored_bytes(self, batch: int) -> memoryview:
        """Return all bytes of a batch, after comparing every checksum.

        Raises:
            DatasetError: if a file is missing, damaged or a link. It names the file.
        """
        return self._frames.stored_bytes(batch)

    @cached_property
    def trajectories(self) -> Trajectories:
        """The complete episodes; reads their positions, but not their content."""
        episodes = self._frames.episode_spans()
        return Trajectories(self._frames, self.contents, *episodes)

    @cached_property
    def transitions(self) -> Transitions:
        """All frames, including those of episodes that did not end."""
        part = self.parts[0] if len(self.parts) == 1 else None
        return Transitions(self._frames, self._frames.all_spans(), part)

    @method(LoaderArguments)
    def loader(self, options: LoaderArguments) -> Loader:
        """Return mini-batches of single frames ``[n]`` for training.

        ``transitions``, ``trajectories``, ``trajectories.sequences(length)`` and every
        selection of keys, frames or episodes have this method too.

        Raises:
            ValueError: if there is nothing to load, or an argument does not fit.
        """
        return Loader(self.transitions, options)

    def __repr__(self) -> str:
        """Return the path, the task and the sizes."""
        totals = self.contents.totals
        return (
            f"Dataset({self.name!r}, task={self.contents.description.task!r}, "
            f"{len(self)} batches, {totals.frames} frames, {totals.episodes} episodes)"
        )

    def _repr_html_(self) -> str:
        """Show sizes and groups as tables in notebooks."""
        contents = self.contents
        totals = contents.totals
        rows = {
            "path": self.name,
            "batches": len(self),
            "frames": f"{totals.frames:,}",
            "episodes": f"{totals.episodes:,}",
            "mean length": totals.mean_length,
            "mean team return": totals.mean_team_return,
            "runs": len(contents.runs),
        }
        about = notebooks.facts(contents.description.task, rows)
        return about + contents.description.environment.to_html()


def open_dataset(
    path: str | Path,
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """Open a dataset that ``record``, ``marl-collect collect`` or a ``Writer`` wrote.

    Args:
        path: a folder, or a URL such as ``"s3://bucket/data"``. What is read from an
            object store is copied to a temporary folder, and removed with the dataset.
        storage_options: arguments of the fsspec file system of a URL.
        cache: folder that keeps what is read from a URL for other processes and later
            ones. It may have parts of any datasets. Nothing removes them: delete the
            folder when no dataset uses it.

    Raises:
        FileNotFoundError: if the folder holds no dataset.
        DatasetError: if its index is damaged, or of a newer version.
        ValueError: if there are options or a cache, but no URL.
    """
    folder = open_folder(path, storage_options, cache)
    index = Index.load(folder)
    if cache is not None and isinstance(folder, RemoteFolder):
        folder.keep({segment_name(n): text for n, text in index.digests.items()})
    return Dataset([(folder, index)])


def concatenate(datasets: Sequence[Dataset | str | Path]) -> Dataset:
    """Return a view over several datasets, which reads like one; nothing is copied.

    Episodes, frames and runs are in the order of ``datasets``.

    Args:
        datasets: at least one, or their folders, of one kind: task, environment
            settings, groups, spaces and keys are equal.

    Raises:
        ValueError: if there are none, or two are of different kinds. The message names
            the first difference.
        FileNotFoundError: if a folder holds no dataset.
    """
    if isinstance(datasets, str | Path | Dataset) or not datasets:
        raise ValueError(
            f"datasets is {datasets!r}, but must be a list of datasets or of folders."
        )
    opened = [d if isinstance(d, Dataset) else open_dataset(d) for d in datasets]
    for other in opened[1:]:
        different = opened[0].contents.difference(other.contents)
        if different is not None:
            name, first, second = different
            raise ValueError(
                f"{other.name} and {opened[0].name} are of different kinds: {name} is "
                f"{second} in the former, but {first} in the latter. Datasets that are "
                "joined need the same task, settings, groups, spaces and keys."
            )
    return Dataset([part for dataset in opened for part in dataset.parts])
