"""Complete episodes: read, sample, filter, split, save; sequences and n-step parts."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, final, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.core.description import Key
from marl_collect.core.seeding import episode_seeds
from marl_collect.files.folders import completed
from marl_collect.files.urls import local_folder
from marl_collect.storage.columns import DONE, Column, flat_rows
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.frames import (
    Frames,
    Transitions,
    draw,
    item_numbers,
    ranges,
    starts,
)
from marl_collect.storage.loading import Loadable
from marl_collect.storage.writer import Writer

_Chosen = NDArray[np.int64] | slice
_ABOUT: Final = ("traj_id", "length", "terminated")
_FILE_BYTES: Final = 2**26
"""Decoded size of a saved batch: what writing and reading one hold in memory."""


@final
class Trajectories(Sequence[TensorDict], Loadable):
    """Complete episodes, in the order in which they ended.

    ``trajectories[i]`` reads one episode ``[T]`` into new memory. A slice, a filter or
    a split is another ``Trajectories`` and reads nothing.

    Attributes:
        name: of the dataset in messages.
        description: of the dataset.
        runs: of the dataset, by number.
    """

    def __init__(self, frames: Frames, rows: NDArray[Any]) -> None:
        # Rows of ``Cache.episodes``.
        self._frames, self._rows, self.name = frames, rows, frames.name
        self.description: DatasetDescription = frames.description
        self.runs: tuple[RunDescription, ...] = frames.runs

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TensorDict: ...

    @overload
    def __getitem__(self, index: slice) -> "Trajectories": ...

    def __getitem__(self, index: int | slice) -> "TensorDict | Trajectories":
        """Read an episode ``[T]``, or select several.

        Raises:
            IndexError: if there is no such episode.
        """
        if isinstance(index, slice):
            return self._take(index)
        return self._cat(self._number(operator.index(index)))

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        return self._padded(np.asarray(indices))

    @property
    def keys(self) -> tuple[Column, ...]:
        """Key, shape of a frame, and dtype of every tensor that is read."""
        return self._frames.keys

    @property
    def run_numbers(self) -> NDArray[np.int64]:
        """Number of the run of each episode, ``[n]``."""
        return self._rows["run"].astype(np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Frames of each episode, ``[n]``."""
        return np.ascontiguousarray(self._rows["length"])

    @property
    def terminated(self) -> NDArray[np.bool_]:
        """Whether the environment ended each episode; otherwise it was truncated."""
        return np.ascontiguousarray(self._rows["terminated"])

    @cached_property
    def agent_returns(self) -> dict[str, NDArray[np.float64]]:
        """Undiscounted returns ``[n, n_agents]`` of the groups that have rewards."""
        columns = {column.key: column.name for column in self._frames.cache.columns}
        return {
            group: flat_rows(np.ascontiguousarray(self._rows[columns[key]]))
            for group in self._frames.groups
            if (key := ("next", group, "reward")) in columns
        }

    @property
    def returns(self) -> NDArray[np.float64]:
        """Undiscounted return of each episode, summed over all agents, ``[n]``."""
        sums = (values.sum(1) for values in self.agent_returns.values())
        return sum(sums, start=np.zeros(len(self)))

    @property
    def seeds(self) -> list[int | None]:
        """Seed that each episode was reset with; None if it is unknown.

        It follows from the run's seed and the trajectory's id. ``reset_row(seed)`` and
        the episode's actions reproduce the episode, if the environment is
        deterministic.
        """
        seeds: list[int | None] = [None] * len(self)
        ids, runs = self._rows["traj_id"], self.run_numbers
        for run in np.unique(runs).tolist():
            seed = self.runs[run].seed
            if seed is None:
                continue
            rows = np.flatnonzero(runs == run)
            numbers = episode_seeds(seed, ids[rows] >> 32, ids[rows] & 0xFFFFFFFF)
            for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
                seeds[row] = number
        return seeds

    @property
    def episodes(self) -> list[EndedEpisode]:
        """Trajectory, length, end and returns of each episode, without reading it."""
        returns = [
            [(name, tuple(agents)) for agents in values.tolist()]
            for name, values in self.agent_returns.items()
        ]
        columns = (self._rows[name].tolist() for name in _ABOUT)
        return [
            EndedEpisode(traj_id, length, end, dict(group[i] for group in returns))
            for i, (traj_id, length, end) in enumerate(zip(*columns, strict=True))
        ]

    def first(self, key: Key) -> NDArray[Any]:
        """Return one key, or a KeyError, in the first frame of each episode."""
        numbers = self._frames.numbers(self._rows["first"], np.ones_like(self.lengths))
        return self._frames.select(key).arrays(numbers)[key]

    def arrays(self, index: int) -> dict[Key, NDArray[Any]]:
        """Read an episode: every key ``[T, ...]``, float32 instead of bfloat16."""
        return self._frames.arrays(self._numbers(self._number(index)))

    @property
    def transitions(self) -> Transitions:
        """The frames of these episodes."""
        return Transitions(self._frames, self._numbers(slice(None)))

    def select(self, *keys: str | Key) -> "Trajectories":
        """Return the same episodes with these keys, and those below them, only.

        Raises:
            KeyError: if a key does not exist.
        """
        return Trajectories(self._frames.select(*keys), self._rows)

    def filter(self, keep: Callable[[EndedEpisode], bool]) -> "Trajectories":
        """Select the episodes for which ``keep`` is true."""
        chosen = [bool(keep(episode)) for episode in self.episodes]
        return self._take(np.flatnonzero(chosen))

    def split_by_return(
        self,
        quantiles: Sequence[float] = (1 / 3, 2 / 3),
        *,
        group: str | None = None,
    ) -> "list[Trajectories]":
        """Split the episodes by return, lowest first.

        Args:
            quantiles: ascending, between 0 and 1. k quantiles make k + 1 parts.
                Episodes with equal returns go into the same part, so parts may differ
                in size.
            group: use the return of this group, summed over its agents; None uses
                all agents.

        Raises:
            ValueError: if the quantiles do not ascend between 0 and 1.
            KeyError: if there is no such group.
        """
        edges = list(quantiles)
        if edges != sorted(set(edges)) or not all(0 < q < 1 for q in edges):
            raise ValueError(f"quantiles must ascend between 0 and 1, not {edges}.")
        groups = self._frames.groups
        if group is not None and group not in groups:
            raise KeyError(
                f"There is no group {group!r}; expected {', '.join(groups)}."
            )
        returns = self.returns if group is None else self.agent_returns[group].sum(1)
        if not len(self):
            return [self] * (len(edges) + 1)
        part = np.searchsorted(np.quantile(returns, edges), returns, side="right")
        return [self._take(np.flatnonzero(part == p)) for p in range(len(edges) + 1)]

    def sample(
        self,
        n: int,
        *,
        form: Literal["padded", "cat"] = "padded",
        generator: torch.Generator | None = None,
    ) -> TensorDict:
        """Sample ``n`` episodes uniformly, with replacement.

        Args:
            n: number of episodes.
            form: ``"padded"`` returns ``[n, longest]``, padded with zeros, and a bool
                ``("collector", "mask")``; ``"cat"`` returns ``[sum of T]``.
            generator: random generator; torch's default if None.

        Raises:
            ValueError: if there are no episodes, or if ``n`` or ``form`` is invalid.
        """
        if form not in ("padded", "cat"):
            raise ValueError(f'form must be "padded" or "cat", but is {form!r}.')
        what = f"episodes to sample in {self.name}"
        drawn = draw(n, len(self), what, generator)
        return self._cat(drawn) if form == "cat" else self._padded(drawn)

    def sequences(
        self, length: int, *, stride: int | None = None, burn_in: int = 0
    ) -> "Sequences":
        """Cut the episodes into pieces of ``length`` frames.

        Args:
            length: frames of a piece.
            stride: frames from the beginning of a piece to that of the next one; less
                than ``length`` makes pieces overlap. None: ``length``.
            burn_in: frames of the episode in front of each piece, from which a
                recurrent network computes its state. Pieces are then ``[burn_in +
                length]``. Where the episode has fewer frames in front, the first
                columns are padded.

        Raises:
            ValueError: if the numbers do not fit.
        """
        stride = length if stride is None else stride
        return Sequences(self._frames, self._rows, length, stride, burn_in)

    def n_step(self, n: int, *, gamma: float = 0.99) -> "NSteps":
        """Return transitions over ``n`` frames, for n-step returns.

        Args:
            n: frames from an observation to the next one; fewer at the end of an
                episode.
            gamma: discount of the rewards in between.

        Raises:
            ValueError: if ``n`` is less than 1, ``gamma`` is not between 0 and 1, or no
                reward is selected.
        """
        return NSteps(self._frames, self._rows, n, gamma)

    def save(self, path: str | Path) -> None:
        """Write these episodes, with the selected keys, as a dataset.

        To delete episodes of a dataset, save the others. Runs get new names,
        and keep their descriptions and seeds.

        Args:
            path: a folder that does not exist, or is empty. It appears when it is
                complete.

        Raises:
            ValueError: if there are no episodes.
            KeyError: if a key that tells episodes apart was not selected.
            FileExistsError: if something is at ``path``.
        """
        frames, target = self._frames, local_folder(path)
        missing = {TRAJ_IDS, DONE} - {column.key for column in frames.keys}
        if missing:
            raise KeyError(
                f"Datasets need the keys {sorted(missing)}: select them too."
            )
        if not len(self):
            raise ValueError(f"There are no episodes of {self.name} to save.")
        size = sum(column.nbytes for column in frames.keys)
        with completed(target, "save", or_empty=True) as temporary:
            for run in np.unique(self._rows["run"]).tolist():
                rows = self._rows[self._rows["run"] == run]
                ends = starts(rows["length"])[1:] * size // _FILE_BYTES
                cuts = np.flatnonzero(np.diff(ends)) + 1
                # New runs, so files of several selections may be in one folder.
                with Writer(temporary, self.description, self.runs[run]) as writer:
                    for part in np.split(rows, cuts):
                        numbers = frames.numbers(part["first"], part["length"])
                        tensors = frames.read(numbers)
                        values = {c: c.array(tensors[c.key]) for c in frames.keys}
                        index = ranges(np.zeros(len(part), np.int64), part["length"])
                        writer.write(values, index.astype(np.int32))

    def __repr__(self) -> str:
        return (
            f"Trajectories({self.name!r}, {len(self)} episodes, "
            f"{int(self.lengths.sum())} frames)"
        )

    def _take(self, chosen: _Chosen) -> "Trajectories":
        return Trajectories(self._frames, self._rows[chosen])

    def _number(self, index: int) -> NDArray[np.int64]:
        return item_numbers(index, len(self), "episode").reshape(1)

    def _numbers(self, chosen: _Chosen) -> NDArray[np.int64]:
        """Return the numbers of the frames of some episodes, back to back."""
        rows = self._rows[chosen]
        return self._frames.numbers(rows["first"], rows["length"])

    def _cat(self, chosen: _Chosen) -> TensorDict:
        numbers = self._numbers(chosen)
        return self._frames.nested(self._frames.read(numbers), [len(numbers)])

    def _padded(self, chosen: _Chosen) -> TensorDict:
        first, lengths = self._rows["first"][chosen], self._rows["length"][chosen]
        return self._frames.padded(first, lengths, int(lengths.max(initial=0)))


@final
class Sequences(Loadable):
    """Pieces of episodes with the same number of frames, for recurrent networks.

    A piece is ``[burn_in + length]``, several are ``[n, burn_in + length]``. Every
    frame of an episode is in a piece. The last piece is padded with zeros behind its
    frames, and pieces with ``burn_in`` in front of them; ``("collector", "mask")`` says
    which frames are valid.
    """

    def __init__(
        self,
        frames: Frames,
        episodes: NDArray[Any],
        length: int,
        stride: int,
        burn_in: int,
    ) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, but is {length}.")
        if not 1 <= stride <= length:
            raise ValueError(
                f"stride must be between 1 and length={length}, but is {stride}: "
                "every frame is in a piece."
            )
        if burn_in < 0:
            raise ValueError(f"burn_in must be at least 0, but is {burn_in}.")
        self._frames, self._episodes = frames, episodes
        self._length, self._stride, self._burn_in = length, stride, burn_in
        beyond_first = np.maximum(episodes["length"] - length, 0)
        # The last piece of an episode is the first one that reaches its end.
        self._pieces = starts(1 + -(-beyond_first // stride))

    def __len__(self) -> int:
        return int(self._pieces[-1])

    def __getitem__(self, index: int) -> TensorDict:
        return self.__getitems__([operator.index(index)])[0]

    def __iter__(self) -> Iterator[TensorDict]:
        return (self[i] for i in range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        items = item_numbers(indices, len(self), "piece")
        episode = np.searchsorted(self._pieces, items, side="right") - 1
        rows = self._episodes[episode]
        offset = self._stride * (items - self._pieces[episode])
        begin = np.maximum(offset - self._burn_in, 0)
        end = np.minimum(rows["length"], offset + self._length)
        padding = np.maximum(self._burn_in - offset, 0)
        width = self._burn_in + self._length
        return self._frames.padded(rows["first"] + begin, end - begin, width, padding)

    def __repr__(self) -> str:
        width = self._burn_in + self._length
        return f"Sequences({self._frames.name!r}, {len(self)} of {width} frames)"


@final
class NSteps(Loadable):
    """Transitions over several frames of an episode, one that begins at each frame.

    Several are ``[n]``. Keys at the root are those of the first frame, keys under
    ``next`` those of the last one, and rewards are the discounted sum in between.
    ``"steps_to_next_obs"`` ``[n, 1]`` is the number of frames, and ``"gamma"`` ``[n,
    1]`` the discount of the value of the next observation, ``gamma **
    steps_to_next_obs``; the names are those of TorchRL's ``MultiStep``.
    """

    def __init__(
        self, frames: Frames, episodes: NDArray[Any], n: int, gamma: float
    ) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, but is {n}.")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be between 0 and 1, but is {gamma}.")
        root = [column.key for column in frames.keys if not column.root]
        after = [column.key for column in frames.keys if column.root]
        rewards = [column.key for column in frames.keys if column.is_reward]
        if not rewards:
            raise ValueError("No reward is selected: add its key to select().")
        self._frames, self._n, self._gamma = frames, n, gamma
        self._root, self._after = frames.select(*root), frames.select(*after)
        self._rewards = frames.select(*rewards)
        self._episodes, self._starts = episodes, starts(episodes["length"])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        items = item_numbers(indices, len(self), "frame")
        episode = np.searchsorted(self._starts, items, side="right") - 1
        rows = self._episodes[episode]
        offset = items - self._starts[episode]
        steps = np.minimum(self._n, rows["length"] - offset)
        between = self._frames.numbers(rows["first"] + offset, steps)
        item_starts = starts(steps)
        tensors = self._root.read(between[item_starts[:-1]])
        tensors |= self._after.read(between[item_starts[1:] - 1])
        item = torch.from_numpy(np.repeat(np.arange(len(steps)), steps))
        power = torch.from_numpy(ranges(np.zeros_like(steps), steps))
        discount = self._gamma ** power.double()
        for key, values in self._rewards.read(between).items():
            weighted = values * discount.view(-1, *[1] * (values.ndim - 1))
            total = weighted.new_zeros(tensors[key].shape)
            tensors[key] = total.index_add_(0, item, weighted).to(values.dtype)
        count = torch.from_numpy(steps).view(-1, 1)
        tensors["steps_to_next_obs",] = count
        tensors["gamma",] = (self._gamma ** count.double()).float()
        return self._frames.nested(tensors, [len(steps)], time=False)

    def __repr__(self) -> str:
        return f"NSteps({self._frames.name!r}, {len(self)} frames, n={self._n})"
