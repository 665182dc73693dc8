"""Reads, samples, filters and splits the complete episodes of a dataset."""

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, final, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.buffers.layout import TRAJ_IDS, VALID
from marl_collect.core.description import Key
from marl_collect.core.seeding import episode_seed
from marl_collect.core.tensordicts import assemble
from marl_collect.errors import warn
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.index import KeyField
from marl_collect.storage.loading import Loadable
from marl_collect.storage.mapping import MappedBatches
from marl_collect.storage.samples import Sample
from marl_collect.storage.spans import Frames, Span, read_spans
from marl_collect.storage.transitions import Transitions

_TOLERATED_SHARE = 0.1
"""Difference of a part from its share, of all episodes, that is no surprise."""

Found = tuple[EndedEpisode, tuple[Span, ...]]


@final
class Trajectories(Sequence[TensorDict], Loadable):
    """Complete episodes, in the order in which they ended.

    ``trajectories[i]`` reads one episode ``[T]`` into new memory. A slice, a filter or
    a split is another ``Trajectories`` and reads nothing.
    """

    def __init__(self, batches: MappedBatches, found: Sequence[Found]) -> None:
        """Select episodes by their positions."""
        self._batches = batches
        self._found = found

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self._found)

    @overload
    def __getitem__(self, index: int) -> TensorDict: ...

    @overload
    def __getitem__(self, index: slice) -> "Trajectories": ...

    def __getitem__(self, index: int | slice) -> "TensorDict | Trajectories":
        """Read an episode ``[T]``, or select several."""
        if isinstance(index, slice):
            return Trajectories(self._batches, self._found[index])
        return self._cat([operator.index(index)])

    def __iter__(self) -> Iterator[TensorDict]:
        """Read one episode after the other."""
        return (self._cat([i]) for i in range(len(self)))

    @property
    def episodes(self) -> list[EndedEpisode]:
        """Environment, length, end and returns of each episode, without reading it."""
        return [episode for episode, _ in self._found]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Frames of each episode, ``[n]``."""
        return np.array([e.length for e, _ in self._found], np.int64)

    @property
    def returns(self) -> NDArray[np.float64]:
        """Undiscounted return of each episode, summed over all agents, ``[n]``."""
        return np.array([e.team_return for e, _ in self._found], np.float64)

    @property
    def seeds(self) -> list[int | None]:
        """Seed that each episode was reset with; None if it is unknown.

        It follows from the run's seed and the trajectory's id. ``reset_row(seed)`` and
        the episode's actions reproduce the episode, if the environment is
        deterministic.
        """
        runs = self._batches.index.runs
        ids = next((f for f in self._batches.index.keys if f.key == TRAJ_IDS), None)
        seeds: list[int | None] = []
        for _, ((batch, row, frame, _), *_) in self._found:
            seed = runs[self._batches.index.batches[batch].run].seed
            if seed is None or ids is None:
                seeds.append(None)
                continue
            number = int(self._batches.tensor(batch, ids)[row, frame])
            seeds.append(episode_seed(seed, number >> 32, number & 0xFFFFFFFF))
        return seeds

    @property
    def description(self) -> DatasetDescription:
        """Task, groups and spaces of the dataset."""
        return self._batches.index.description

    @property
    def keys(self) -> tuple[KeyField, ...]:
        """Key, shape of a frame, and dtype of every tensor that is read."""
        return self._batches.keys

    @property
    def runs(self) -> tuple[RunDescription, ...]:
        """The runs of the dataset."""
        return self._batches.index.runs

    @property
    def run_numbers(self) -> list[int]:
        """Index in ``runs`` of the run that wrote each episode."""
        batches = self._batches.index.batches
        return [batches[spans[0][0]].run for _, spans in self._found]

    def cat(self) -> TensorDict:
        """Read all episodes, back to back: ``[sum of lengths]``."""
        return self._cat(range(len(self)))

    @property
    def transitions(self) -> Transitions:
        """The frames of these episodes."""
        spans = [span for _, spans in self._found for span in spans]
        return Transitions(self._batches, spans)

    def select(self, *keys: str | Key) -> "Trajectories":
        """Return the same episodes with these keys, and those below them, only.

        Raises:
            KeyError: if a key does not exist.
        """
        return Trajectories(self._batches.select(*keys), self._found)

    def filter(self, keep: Callable[[EndedEpisode], bool]) -> "Trajectories":
        """Select the episodes for which ``keep`` is true."""
        chosen = [found for found in self._found if keep(found[0])]
        return Trajectories(self._batches, chosen)

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
                in size; a warning names a part that is far from its share.
            group: use the return of this group, summed over its agents; None uses
                all agents.

        Raises:
            ValueError: if the quantiles do not ascend between 0 and 1.
            KeyError: if there is no such group.
        """
        edges = list(quantiles)
        if edges != sorted(set(edges)) or not all(0 < q < 1 for q in edges):
            raise ValueError(f"quantiles must ascend between 0 and 1, not {edges}.")
        returns = self.returns if group is None else self._returns_of(group)
        if not len(self):
            return [self] * (len(edges) + 1)
        part = np.searchsorted(np.quantile(returns, edges), returns, side="right")
        _warn_of_ties(part, edges, returns)
        return [
            Trajectories(
                self._batches,
                [self._found[i] for i in np.flatnonzero(part == p).tolist()],
            )
            for p in range(len(edges) + 1)
        ]

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
            ValueError: if there are no episodes, or if ``form`` is invalid.
        """
        if form not in ("padded", "cat"):
            raise ValueError(f'form must be "padded" or "cat", but is {form!r}.')
        if not self._found:
            raise ValueError(
                f"There are no episodes to sample in {self._batches.name}."
            )
        drawn = torch.randint(len(self), (n,), generator=generator).tolist()
        return self._cat(drawn) if form == "cat" else self._padded(drawn)

    def __repr__(self) -> str:
        """Return the path and the sizes."""
        return (
            f"Trajectories({self._batches.name!r}, {len(self)} episodes, "
            f"{int(self.lengths.sum())} frames)"
        )

    def _returns_of(self, group: str) -> NDArray[np.float64]:
        groups = self.description.environment.groups
        if group not in groups:
            raise KeyError(
                f"There is no group {group!r}; expected {', '.join(groups)}."
            )
        return np.array([sum(e.returns[group]) for e, _ in self._found], np.float64)

    def _cat(self, chosen: Sequence[int]) -> TensorDict:
        lengths = [self._found[i][0].length for i in chosen]
        begins = [0, *accumulate(lengths)]
        pieces = [self._found[i][1] for i in chosen]
        return _read(self._batches, pieces, begins, [begins[-1]])

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        """Read episodes, padded; torch's ``DataLoader`` calls this method."""
        return self._padded(indices)

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
        episodes = [spans for _, spans in self._found]
        stride = length if stride is None else stride
        return Sequences(self._batches, episodes, length, stride, burn_in)

    def _padded(self, chosen: Sequence[int]) -> TensorDict:
        pieces = [self._found[i][1] for i in chosen]
        lengths = [self._found[i][0].length for i in chosen]
        return _read_padded(self._batches, pieces, max(lengths), [0] * len(pieces))


@final
class Sequences(Loadable):
    """Pieces of episodes with the same number of frames, for recurrent networks.

    Every frame of an episode is in a piece. The last piece is padded with zeros behind
    its frames, and pieces with ``burn_in`` in front of them;
    ``("collector", "mask")`` says which frames are valid.
    """

    def __init__(
        self,
        batches: MappedBatches,
        episodes: Sequence[tuple[Span, ...]],
        length: int,
        stride: int,
        burn_in: int,
    ) -> None:
        """Cut episodes, given as spans; nothing is read yet.

        Raises:
            ValueError: if the numbers do not fit.
        """
        if length < 1:
            raise ValueError(f"length must be at least 1, but is {length}.")
        if not 1 <= stride <= length:
            raise ValueError(
                f"stride must be between 1 and length={length}, but is {stride}: "
                "every frame is in a piece."
            )
        if burn_in < 0:
            raise ValueError(f"burn_in must be at least 0, but is {burn_in}.")
        self._batches = batches
        self._length, self._stride, self._burn_in = length, stride, burn_in
        self._spans = [span for spans in episodes for span in spans]
        # With all episodes back to back: where each span begins.
        self._starts = Frames.of(batches, self._spans).starts
        spans = np.cumsum([0, *map(len, episodes)])
        # Where each episode begins, and its end.
        self._episodes = self._starts[spans]
        beyond_first = np.maximum(np.diff(self._episodes) - length, 0)
        # The last piece of an episode is the first one that reaches its end.
        self._pieces = np.cumsum([0, *(1 + -(-beyond_first // stride))])

    def __len__(self) -> int:
        """Number of pieces."""
        return int(self._pieces[-1])

    def __getitem__(self, index: int) -> TensorDict:
        """Read one piece ``[burn_in + length]``."""
        return self.__getitems__([operator.index(index)])[0]

    def __iter__(self) -> Iterator[TensorDict]:
        """Read one piece after the other."""
        return (self[i] for i in range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        """Read pieces ``[n, burn_in + length]``; ``DataLoader`` calls this method."""
        padding, pieces = zip(*map(self._piece, indices), strict=True)
        width = self._burn_in + self._length
        return _read_padded(self._batches, pieces, width, padding)

    def __repr__(self) -> str:
        """Return the path and the sizes."""
        width = self._burn_in + self._length
        return f"Sequences({self._batches.name!r}, {len(self)} of {width} frames)"

    def _piece(self, index: int) -> tuple[int, list[Span]]:
        """Return the columns in front of a piece's first frame, and its frames.

        Raises:
            IndexError: if there is no such piece.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"Piece {index} is out of range of {len(self)} pieces.")
        index %= len(self)
        episode = int(np.searchsorted(self._pieces, index, side="right")) - 1
        first, end = self._episodes[episode : episode + 2].tolist()
        begin = first + self._stride * (index - int(self._pieces[episode]))
        end = min(end, begin + self._length)
        padding = max(0, self._burn_in - (begin - first))
        begin -= self._burn_in - padding
        spans = []
        number = int(np.searchsorted(self._starts, begin, side="right")) - 1
        while begin < end:
            batch, row, span_first, _ = self._spans[number]
            skipped = begin - int(self._starts[number])
            frames = min(end, int(self._starts[number + 1])) - begin
            spans.append(
                (batch, row, span_first + skipped, span_first + skipped + frames)
            )
            begin += frames
            number += 1
        return padding, spans


def _read_padded(
    batches: MappedBatches,
    pieces: Sequence[Sequence[Span]],
    width: int,
    padding: Sequence[int],
) -> TensorDict:
    """Read pieces ``[n, width]`` and their mask.

    Args:
        batches: to read from.
        pieces: the spans of each piece.
        width: frames of a row.
        padding: frames of zeros in front of each piece; behind it they fill the row.
    """
    first = torch.tensor(padding)[:, None]
    lengths = [sum(end - begin for _, _, begin, end in spans) for spans in pieces]
    last = first + torch.tensor(lengths)[:, None]
    begins = [row * width + space for row, space in enumerate(padding)]
    out = _read(batches, pieces, begins, [len(pieces), width])
    column = torch.arange(width)
    out.set(VALID, (first <= column) & (column < last))
    return out


def _warn_of_ties(
    part: NDArray[np.int64], edges: list[float], returns: NDArray[np.float64]
) -> None:
    """Warn if equal returns leave a part far from its share."""
    n = len(part)
    counts = np.bincount(part, minlength=len(edges) + 1)
    shares = n * np.diff([0, *edges, 1])
    if np.abs(counts - shares).max() <= max(1, _TOLERATED_SHARE * n):
        return
    values, ties = np.unique(returns, return_counts=True)
    warn(
        f"split_by_return makes parts of {counts.tolist()} episodes, but the quantiles "
        f"{edges} ask for about {shares.round().astype(int).tolist()}: {ties.max()} "
        f"of {n} episodes have the return {values[ties.argmax()]:g}, and equal returns "
        "go into the same part. Other quantiles, another group, or "
        "filter(lambda episode: ...) may fit better."
    )


def _read(
    batches: MappedBatches,
    pieces: Sequence[Sequence[Span]],
    begins: Sequence[int],
    shape: list[int],
) -> TensorDict:
    """Read each piece to its place in the flattened result."""
    places: list[tuple[int, Span]] = []
    for spans, at in zip(pieces, begins, strict=False):
        for span in spans:
            places.append((at, span))
            at += span[3] - span[2]
    flat: dict[Key, Any] = read_spans(batches, places, int(np.prod(shape)))
    tensors = {k: t.view(*shape, *t.shape[1:]) for k, t in flat.items()}
    groups = batches.index.description.environment.groups
    n_agents = {name: group.n_agents for name, group in groups.items()}
    return assemble(tensors, shape, n_agents, time=True, kind=Sample)
