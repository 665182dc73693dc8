"""Opens a dataset as a list of TensorDicts; nothing is read before it is used."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final, overload

from tensordict import TensorDict, TensorDictBase

from marl_collect import notebooks
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.index import EPISODES, Index, episodes_from_json
from marl_collect.storage.mapping import MappedBatches, map_file
from marl_collect.storage.selection import Trajectories
from marl_collect.storage.spans import all_spans, episode_spans
from marl_collect.storage.transitions import Transitions


@final
class Dataset(Sequence[TensorDictBase]):
    """The complete batches of a folder, in the order in which they were written.

    ``dataset[i]`` is the batch ``[B, T]``, mapped into memory. What you write into it
    stays with you: the files do not change.

    Attributes:
        path: the folder.
        contents: description, runs, totals and the list of batches, as they were when
            this was opened.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the index.

        Raises:
            FileNotFoundError: if the folder holds no dataset.
            ValueError: if its index cannot be read by this version.
        """
        self.path = Path(path)
        self.contents = Index.load(self.path)
        self._maps = MappedBatches(self.path, self.contents)

    def __len__(self) -> int:
        """How many batches there are."""
        return len(self.contents.batches)

    @overload
    def __getitem__(self, index: int) -> TensorDictBase: ...

    @overload
    def __getitem__(self, index: slice) -> list[TensorDictBase]: ...

    def __getitem__(self, index: int | slice) -> TensorDictBase | list[TensorDictBase]:
        """Map a batch, or several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        folder = self.path / self.contents.batches[index].name
        loaded = TensorDict.load_memmap(folder, allow_pickle=False)
        batch = _private(loaded)
        _name_time(batch)
        return batch

    def episodes(self, batch: int | None = None) -> Iterator[EndedEpisode]:
        """Yield the episodes that ended, in all batches or in one."""
        chosen = (
            self.contents.batches if batch is None else [self.contents.batches[batch]]
        )
        for entry in chosen:
            text = (self.path / entry.name / EPISODES).read_text(encoding="utf-8")
            yield from episodes_from_json(text)

    @cached_property
    def trajectories(self) -> Trajectories:
        """The complete episodes; reads where they are, and not yet what they hold."""
        found = [
            (episode, episode_spans(self._maps, batch, episode))
            for batch in range(len(self))
            for episode in self.episodes(batch)
        ]
        return Trajectories(self._maps, found)

    @cached_property
    def transitions(self) -> Transitions:
        """All frames, those of episodes that did not end included."""
        return Transitions(self._maps, list(all_spans(self._maps)))

    def __repr__(self) -> str:
        """Say how much there is of what."""
        totals = self.contents.totals
        return (
            f"Dataset({str(self.path)!r}, task={self.contents.description.task!r}, "
            f"{len(self)} batches, {totals.frames} frames, {totals.episodes} episodes)"
        )

    def _repr_html_(self) -> str:
        """Show what there is, and the groups, as tables in notebooks."""
        contents = self.contents
        totals = contents.totals
        rows = {
            "path": self.path,
            "batches": len(self),
            "frames": f"{totals.frames:,}",
            "episodes": f"{totals.episodes:,}",
            "mean length": totals.mean_length,
            "mean team return": totals.mean_team_return,
            "runs": len(contents.runs),
        }
        about = notebooks.facts(contents.description.task, rows)
        return about + notebooks.environment(contents.description.environment)


def open_dataset(path: str | Path) -> Dataset:
    """Open what ``marl-collect collect`` or a :class:`Writer` wrote.

    Raises:
        FileNotFoundError: if the folder holds no dataset.
        ValueError: if its index cannot be read by this version.
    """
    return Dataset(path)


def _private(loaded: TensorDictBase) -> TensorDict:
    """Map the same files again, copy-on-write."""
    content: dict[str, Any] = {}
    for name, value in loaded.items():
        if isinstance(value, TensorDictBase):
            content[name] = _private(value)
        else:
            content[name] = map_file(value.filename, tuple(value.shape), value.dtype)
    return TensorDict(content, batch_size=loaded.batch_size)


def _name_time(batch: TensorDictBase) -> None:
    """Name the dimensions as in the batches of a collector; files do not keep names."""
    batch.names = [None, "time", *[None] * (batch.ndim - 2)]
    for value in batch.values():
        if isinstance(value, TensorDictBase):
            _name_time(value)
