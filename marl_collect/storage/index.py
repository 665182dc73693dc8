"""The file that says which batches of a dataset are complete, and what they hold."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.files import write_atomically

INDEX = "index.json"
EPISODES = "episodes.json"
FORMAT = "marl_collect dataset"
VERSION = 1
BATCH_NAME = re.compile(r"batch-\d{6,}")


@final
@dataclass(frozen=True)
class KeyField:
    """One key of the batches: ``shape`` is that of one frame."""

    key: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@final
@dataclass(frozen=True)
class BatchEntry:
    """One complete batch.

    Attributes:
        name: of its folder.
        run: index of the run that wrote it.
        shape: ``[B, T]``.
        frames: in all of it, those of a ragged batch that count.
        episodes: that ended in it.
        nbytes: of its tensors.
    """

    name: str
    run: int
    shape: tuple[int, int]
    frames: int
    episodes: int
    nbytes: int


@final
@dataclass(frozen=True)
class Totals:
    """Sums over the whole dataset.

    Attributes:
        frames: in all batches.
        nbytes: of all tensors.
        episodes: that ended.
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
    """Everything that ``index.json`` holds."""

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
        """Write ``index.json``, all or nothing."""
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
        write_atomically(folder / INDEX, "{\n" + ",\n".join(entries) + "\n}\n")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read ``index.json``.

        Raises:
            FileNotFoundError: if the folder holds no dataset.
            ValueError: if the file is not an index, or a newer version's.
        """
        path = folder / INDEX
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no dataset: there is no {INDEX} in it."
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls._parse(path, data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} is not an index of a dataset: {error!r}."
            ) from error

    @classmethod
    def _parse(cls, path: Path, data: Mapping[str, Any]) -> Self:
        if data["format"] != FORMAT:
            raise ValueError(
                f"{path} has the format {data['format']!r}, not {FORMAT!r}."
            )
        if data["format_version"] != VERSION:
            raise ValueError(
                f"{path} has the format version {data['format_version']}, but this "
                f"version of marl_collect reads {VERSION}. Install a newer one."
            )
        batches = tuple(_batch(path, entry) for entry in data["batches"])
        sums = data["totals"].pop("return_sums")
        totals = Totals(
            **data["totals"], return_sums={name: tuple(s) for name, s in sums.items()}
        )
        keys = tuple(
            KeyField(tuple(k["key"]), tuple(k["shape"]), k["dtype"])
            for k in data["keys"]
        )
        runs = tuple(RunDescription.from_json(run) for run in data["runs"])
        return cls(DatasetDescription.from_json(data), keys, runs, batches, totals)


def episodes_to_json(episodes: Sequence[EndedEpisode]) -> str:
    """Return the content of a batch's ``episodes.json``."""
    return json.dumps([asdict(episode) for episode in episodes])


def episodes_from_json(text: str) -> list[EndedEpisode]:
    """Return the episodes that ended in a batch."""
    return [
        EndedEpisode(
            data["environment"],
            data["frame"],
            data["length"],
            data["terminated"],
            {name: tuple(values) for name, values in data["returns"].items()},
        )
        for data in json.loads(text)
    ]


def _lines(value: object) -> str:
    """Return JSON with a line for each entry of a list, for people and for diffs."""
    if isinstance(value, list) and value:
        return "[\n " + ",\n ".join(map(_dumps, value)) + "\n]"
    return _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _batch(path: Path, data: Mapping[str, Any]) -> BatchEntry:
    if not BATCH_NAME.fullmatch(data["name"]):  # It becomes part of a path.
        raise ValueError(f"{path} names a batch {data['name']!r}, not batch-NNNNNN.")
    size, frames = data["shape"]
    return BatchEntry(**{**data, "shape": (size, frames)})
