"""Complete episodes: read, sample, filter, split, save; sequences and n-step parts."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, final, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.collectors.options import MOST_FRAMES
from marl_collect.collectors.statistics import episode_means
from marl_collect.core.description import Key
from marl_collect.core.replay import frames_of
from marl_collect.core.seeding import episode_seeds
from marl_collect.core.tensordicts import assemble
from marl_collect.files.folders import completed
from marl_collect.files.urls import local_folder
from marl_collect.options import Option, require
from marl_collect.rollout.episodes import Episode
from marl_collect.storage.columns import DONE, TERMINATED, Column, flat_rows
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.frames import Transitions, starts
from marl_collect.storage.loading import Items, Loadable, item_numbers
from marl_collect.storage.writer import Writer

_Chosen = NDArray[np.int64] | slice
_QUANTILES: Final = Option("", at_least=0, at_most=1, hint="They ascend.")
_STEPS: Final = "steps_to_next_obs"
_DISCOUNT: Final = "gamma"
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

    def __init__(self, frames: Transitions, rows: NDArray[Any]) -> None:
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
        numbers = self._numbers(self._number(operator.index(index)))
        return self._frames.nested(self._frames.read(numbers), [len(numbers)])

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

    def stats(self) -> dict[str, Any]:
        """Return the means over at least one episode, named as in ``collector.stats``.

        Raises:
            ValueError: if there is no episode, or no group has rewards.
        """
        if not (len(self) and self.agent_returns):
            what = "rewards" if len(self) else "complete episodes"
            raise ValueError(f"There are no {what} in {self.name}.")
        return episode_means(
            [Episode(e.environment, e.length, e.returns) for e in self.episodes]
        )

    @property
    def seeds(self) -> list[int | None]:
        """Seed that each episode was reset with; None if it is unknown.

        It follows from the run's seed and the trajectory's id. ``reset_row(seed)`` and
        the episode's actions reproduce the episode, if the environment is
        deterministic.
        """
        seeds: Any = np.full(len(self), None)
        ids, runs = self._rows["traj_id"], self._rows["run"]
        for run in np.unique(runs).tolist():
            seed, rows = self.runs[run].seed, runs == run
            if seed is not None:
                environments, numbers = ids[rows] >> 32, ids[rows] & 0xFFFFFFFF
                seeds[rows] = episode_seeds(seed, environments, numbers)
        return list(seeds)

    @property
    def episodes(self) -> list[EndedEpisode]:
        """Trajectory, length, end and returns of each episode, without reading it."""
        returns = [
            [(name, tuple(agents)) for agents in values.tolist()]
            for name, values in self.agent_returns.items()
        ]
        rows = self._rows[["traj_id", "length", "terminated"]].tolist()
        return [
            EndedEpisode(traj_id, length, end, dict(group[i] for group in returns))
            for i, (traj_id, length, end) in enumerate(rows)
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
        return replace(self._frames, chosen=self._numbers(slice(None)))

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
        self, quantiles: Sequence[float] = (1 / 3, 2 / 3)
    ) -> "list[Trajectories]":
        """Split the episodes by their ``returns``, lowest first.

        Args:
            quantiles: ascending, between 0 and 1. k quantiles make k + 1 parts.
                Episodes with equal returns go into the same part, so parts may differ
                in size.

        Raises:
            ValueError: if the quantiles do not ascend between 0 and 1.
        """
        edges: Any = np.asarray(quantiles, object).tolist()  # Arrays become lists.
        edges = require("quantiles", edges, Sequence[float], _QUANTILES)
        if edges != sorted({0, *edges, 1})[1:-1]:
            raise ValueError(f"quantiles must ascend between 0 and 1, not {edges}.")
        returns = self.returns
        if not len(self):
            return [self] * (len(edges) + 1)
        part = np.searchsorted(np.quantile(returns, edges), returns, side="right")
        return [self._take(np.flatnonzero(part == p)) for p in range(len(edges) + 1)]

    def sequences(
        self, length: int, *, stride: int | None = None, burn_in: int = 0
    ) -> Items:
        """Cut the episodes into pieces of ``length`` frames, for recurrent networks.

        Every frame is in a piece. The last piece of an episode is padded with zeros
        behind its frames; ``("collector", "mask")`` says which frames are valid.

        Args:
            length: frames of a piece.
            stride: frames from the beginning of a piece to that of the next one; less
                than ``length`` makes pieces overlap. None: ``length``.
            burn_in: frames of the episode in front of each piece, from which a
                recurrent network computes its state. Pieces are then ``[burn_in +
                length]``. Where the episode has fewer frames in front, the first
                columns are padded.

        Raises:
            TypeError: if a number is not an integer.
            ValueError: if the numbers do not fit.
        """
        length = require("length", length, int, Option("", 1, MOST_FRAMES))
        stride = length if stride is None else stride
        bounds = Option("", 1, length, hint="Every frame is in a piece.")
        stride = require("stride", stride, int, bounds)
        burn_in = require("burn_in", burn_in, int, Option("", 0, MOST_FRAMES))
        # The last piece of an episode is the first one that reaches its end.
        counts = 1 + -(-np.maximum(self.lengths - length, 0) // stride)
        read = partial(self._pieces, starts(counts), length, stride, burn_in)
        name = f"sequences of {burn_in + length} frames of {self!r}"
        return Items(name, int(counts.sum()), read)

    def n_step(self, n: int, *, gamma: float = 0.99) -> Items:
        """Return transitions over ``n`` frames, one that begins at each frame.

        Keys at the root are those of the first frame, keys under ``next`` those of the
        last one, and rewards are the discounted sum in between.
        ``"steps_to_next_obs"`` ``[1]`` is the number of frames, and ``"gamma"`` ``[1]``
        the discount of the value of the next observation, ``gamma **
        steps_to_next_obs``; the names are those of TorchRL's ``MultiStep``.

        Args:
            n: frames from an observation to the next one; fewer at the end of an
                episode.
            gamma: discount of the rewards in between.

        Raises:
            TypeError: if one is not a number.
            ValueError: if ``n`` is less than 1, ``gamma`` is not between 0 and 1, no
                reward is selected, or a group has one of the two names.
        """
        n = require("n", n, int, Option("", 1, MOST_FRAMES))
        gamma = require("gamma", gamma, float, Option("", at_least=0, at_most=1))
        if not any(column.is_reward for column in self.keys):
            raise ValueError("No reward is selected: add its key to select().")
        taken = {column.key[0] for column in self.keys} & {_STEPS, _DISCOUNT}
        if taken:
            raise ValueError(
                f"The dataset has keys under {sorted(taken)}, where transitions over "
                f"{n} frames have numbers: select() other keys, or collect with a "
                "group_map that names the group differently."
            )
        read = partial(self._n_steps, n, gamma)
        name = f"transitions over {n} frames of {self!r}"
        return Items(name, int(self.lengths.sum()), read)

    def save(self, path: str | Path) -> None:
        """Write these episodes, with the selected keys, as a dataset.

        To delete episodes of a dataset, save the others. Runs get new names,
        and keep their descriptions and seeds.

        Args:
            path: a folder that does not exist, or is empty. It appears when it is
                complete.

        Raises:
            ValueError: if there are no episodes.
            KeyError: if a key that says where and how episodes end was not selected.
            FileExistsError: if something is at ``path``.
        """
        frames, target = self._frames, local_folder(path)
        needed = {TRAJ_IDS, DONE, TERMINATED} & {c.key for c in frames.cache.columns}
        missing = needed - {column.key for column in frames.keys}
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
                        index = frames_of(np.zeros(len(part), np.int64), part["length"])
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

    def _items(self, numbers: NDArray[np.int64]) -> TensorDict:
        first, lengths = self._rows["first"][numbers], self._rows["length"][numbers]
        return self._frames.padded(first, lengths, int(lengths.max(initial=0)))

    def _parts(
        self, first: NDArray[np.int64], items: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the episode of each item, and the number of the item in it.

        ``first`` has the number of each episode's first item.
        """
        episode = np.searchsorted(first, items, side="right") - 1
        return self._rows[episode], items - first[episode]

    def _pieces(
        self,
        first: NDArray[np.int64],
        length: int,
        stride: int,
        burn_in: int,
        items: NDArray[np.int64],
    ) -> TensorDict:
        rows, piece = self._parts(first, items)
        offset = stride * piece
        begin = np.maximum(offset - burn_in, 0)
        end = np.minimum(rows["length"], offset + length)
        padding = np.maximum(burn_in - offset, 0)
        return self._frames.padded(
            rows["first"] + begin, end - begin, burn_in + length, padding
        )

    def _n_steps(self, n: int, gamma: float, items: NDArray[np.int64]) -> TensorDict:
        rows, offset = self._parts(starts(self.lengths), items)
        steps = np.minimum(n, rows["length"] - offset)
        between = self._frames.numbers(rows["first"] + offset, steps)
        item_starts = starts(steps)
        after = [column for column in self.keys if column.root]
        root = [column for column in self.keys if not column.root]
        rewards = [column for column in after if column.is_reward]
        tensors = self._frames.read(between[item_starts[:-1]], root)
        tensors |= self._frames.read(between[item_starts[1:] - 1], after)
        item = torch.from_numpy(np.repeat(np.arange(len(steps)), steps))
        power = torch.from_numpy(frames_of(np.zeros_like(steps), steps))
        discount = gamma ** power.double()
        for key, values in self._frames.read(between, rewards).items():
            weighted = values * discount.view(-1, *[1] * (values.ndim - 1))
            total = weighted.new_zeros(tensors[key].shape)
            tensors[key] = total.index_add_(0, item, weighted).to(values.dtype)
        count = torch.from_numpy(steps).view(-1, 1)
        tensors[_STEPS,] = count
        tensors[_DISCOUNT,] = (gamma ** count.double()).float()
        return assemble(tensors, [len(steps)], self._frames.groups)
