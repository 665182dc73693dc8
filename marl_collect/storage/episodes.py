"""Finds the episodes in a stream of batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final, overload

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import TRAJ_IDS, VALID

if TYPE_CHECKING:
    from tensordict import TensorDictBase


@final
@dataclass(frozen=True)
class EndedEpisode:
    """One episode, found in the batch in which it ended.

    Attributes:
        environment: index of its environment, which is its row ``b`` of the batch.
        frame: its last frame ``t`` in that batch. It began ``length - 1`` frames
            earlier in the same row, which may be in earlier batches.
        length: in frames.
        terminated: whether the environment ended it; otherwise it was truncated.
        returns: undiscounted sum of rewards of each agent, by group.
    """

    environment: int
    frame: int
    length: int
    terminated: bool
    returns: Mapping[str, tuple[float, ...]]

    @property
    def team_return(self) -> float:
        """Sum over all agents."""
        return sum(sum(returns) for returns in self.returns.values())


Progress = Callable[[int, int, Sequence[EndedEpisode]], None]
"""Called before the first frame and from time to time: frames so far, frames in total,
and the episodes among those since the last call."""


def no_progress(done: int, total: int, ended: Sequence[EndedEpisode]) -> None:
    """Show nothing."""
    del done, total, ended


@final
@dataclass(frozen=True, eq=False)
class EpisodeTable(Sequence[EndedEpisode]):
    """Ended episodes as arrays, each ``[n]``.

    Attributes:
        environment: row of the batch in which each ended.
        frame: its last frame in that batch.
        length: in frames.
        terminated: whether the environment ended it.
        returns: ``[n, n_agents]`` by group.
    """

    environment: NDArray[np.int64]
    frame: NDArray[np.int64]
    length: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    returns: Mapping[str, NDArray[np.float64]]

    @classmethod
    def joined(
        cls, tables: Sequence["EpisodeTable"], rewards: Mapping[str, int]
    ) -> "EpisodeTable":
        """Return the episodes of all tables.

        Args:
            tables: in order; none gives a table without episodes.
            rewards: groups with rewards, each with its number of agents.
        """
        tables = [cls.from_bytes(b"", 0, rewards), *tables]
        columns = zip(*(table.columns for table in tables), strict=True)
        return tables[0].with_columns(map(np.concatenate, columns))

    @staticmethod
    def entry_size(rewards: Mapping[str, int]) -> int:
        """Return the bytes of an episode in ``to_bytes``."""
        return 17 + 8 * sum(rewards.values())

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.length)

    @overload
    def __getitem__(self, index: int) -> EndedEpisode: ...

    @overload
    def __getitem__(self, index: slice) -> "EpisodeTable": ...

    def __getitem__(self, index: int | slice) -> "EndedEpisode | EpisodeTable":
        """Return an episode, or some of them."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        (episode,) = self.take(np.arange(len(self))[[index]])
        return episode

    def __iter__(self) -> Iterator[EndedEpisode]:
        """Yield the episodes as objects."""
        returns = [
            [(name, tuple(agents)) for agents in values.tolist()]
            for name, values in self.returns.items()
        ]
        columns = zip(
            self.environment.tolist(),
            self.frame.tolist(),
            self.length.tolist(),
            self.terminated.tolist(),
            strict=True,
        )
        for number, (environment, frame, length, terminated) in enumerate(columns):
            agents = dict(group[number] for group in returns)
            yield EndedEpisode(environment, frame, length, terminated, agents)

    def take(self, chosen: NDArray[Any]) -> "EpisodeTable":
        """Return some of the episodes."""
        return self.with_columns(column[chosen] for column in self.columns)

    @property
    def columns(self) -> list[NDArray[Any]]:
        """All arrays; returns come last, in the order of groups."""
        positions = [self.environment, self.frame, self.length, self.terminated]
        return [*positions, *self.returns.values()]

    def with_columns(self, columns: Iterable[NDArray[Any]]) -> "EpisodeTable":
        """Return a table of the same groups with other columns."""
        environment, frame, length, terminated, *returns = columns
        by_group = dict(zip(self.returns, returns, strict=True))
        return EpisodeTable(environment, frame, length, terminated, by_group)

    @property
    def team_returns(self) -> NDArray[np.float64]:
        """Sum over all agents."""
        sums = np.zeros(len(self))
        for values in self.returns.values():
            sums += values.sum(1)
        return sums

    def to_bytes(self) -> bytes:
        """Return the table as it is stored in a batch."""
        dtypes = ("<u4", "<u4", "<u8", "<u1", *["<f8"] * len(self.returns))
        columns = zip(self.columns, dtypes, strict=True)
        return b"".join(column.astype(dtype).tobytes() for column, dtype in columns)

    @classmethod
    def from_bytes(
        cls, data: bytes, count: int, rewards: Mapping[str, int]
    ) -> "EpisodeTable":
        """Return the table from the output of ``to_bytes``."""
        begin = 0

        def column(dtype: str, width: int = 1) -> NDArray[Any]:
            nonlocal begin
            values = np.frombuffer(data, dtype, count * width, begin)
            begin += values.nbytes
            return values

        return cls(
            column("<u4").astype(np.int64),
            column("<u4").astype(np.int64),
            column("<u8").astype(np.int64),
            column("<u1").astype(np.bool_),
            {
                name: column("<f8", agents).reshape(count, agents)
                for name, agents in rewards.items()
            },
        )


@final
class EpisodeFinder:
    """Follows episodes from batch to batch."""

    def __init__(self) -> None:
        """Begin with no episode running."""
        self._running: dict[int, tuple[int | None, bool, int, list[Any]]] = {}
        """By row: trajectory, whether its beginning was seen, and the frames and
        returns of each group in earlier batches."""
        self._begun: dict[int, int] = {}
        """Each environment's trajectory that began last, unless it has ended."""
        self._last_ended: dict[int, int] = {}
        """Each environment's trajectory that ended last."""

    def add(self, batch: "TensorDictBase") -> EpisodeTable:
        """Return the episodes that ended in ``batch``, a ``[B, T]`` of a collector.

        Raises:
            ValueError: if an episode continues in another row, after another episode
                of its row, or after its end.
        """
        pieces, first, ends = _pieces(batch)
        trajectories: list[Any] = [None] * len(pieces)
        if TRAJ_IDS in batch.keys(include_nested=True):
            ids = _array(batch[TRAJ_IDS])
            trajectories = ids[pieces.environment, first].tolist()
        whole = np.ones(len(pieces), np.bool_)
        begun = first_frames(batch)
        if begun is not None:
            whole &= begun[pieces.environment, first]
        returns = list(pieces.returns.values())
        for number, (b, trajectory, begin, is_end) in enumerate(
            zip(
                pieces.environment.tolist(),
                trajectories,
                first.tolist(),
                ends.tolist(),
                strict=True,
            )
        ):
            running = None if begin else self._running.pop(b, None)
            if running is not None and running[0] == trajectory:
                _, whole[number], frames_before, returns_before = running
                pieces.length[number] += frames_before
                for values, before in zip(returns, returns_before, strict=True):
                    values[number] += before
            elif trajectory is not None:
                self._begin(b, trajectory)
            if not is_end:
                self._running[b] = (
                    trajectory,
                    bool(whole[number]),
                    int(pieces.length[number]),
                    [values[number].copy() for values in returns],
                )
            elif trajectory is not None:
                self._begun.pop(trajectory >> 32, None)
                self._last_ended[trajectory >> 32] = trajectory
        return pieces.take(np.flatnonzero(ends & whole))

    def _begin(self, b: int, trajectory: int) -> None:
        """Note a new trajectory; raise an error if it continues an old one."""
        environment = trajectory >> 32
        if self._begun.get(environment) == trajectory:
            raise ValueError(
                f"Episode {trajectory & 0xFFFFFFFF} of environment {environment} "
                f"continues in row {b}, but began in another row, or before another "
                "episode of this row: a row must be the same environment in every "
                "batch. Omit split_trajs, use one writer per worker, or collect whole "
                "trajectories with trajs_per_batch."
            )
        if self._last_ended.get(environment) == trajectory:
            raise ValueError(
                f"Episode {trajectory & 0xFFFFFFFF} of environment {environment} "
                f"continues in row {b} after a frame whose ('next', 'done') is True. "
                "set_truncated=True causes this: the pieces would be listed as whole "
                "episodes. Omit it. max_frames_per_traj limits the length of episodes."
            )
        self._begun[environment] = trajectory


def _pieces(
    batch: "TensorDictBase",
) -> tuple[EpisodeTable, NDArray[np.int64], NDArray[np.bool_]]:
    """Cut the valid frames of each row behind the ends of episodes.

    Returns:
        The pieces ``[n]`` as if each were an episode, the first frame of each in its
        row, and whether its episode ends.
    """
    size, frames = batch.shape[:2]
    valid = np.arange(frames) < np.array(valid_frames(batch))[:, None]
    done = _array(batch["next", "done"])[..., 0] & valid
    is_last = valid.copy()
    is_last[:, :-1] &= done[:, :-1] | ~valid[:, 1:]
    row, last = np.nonzero(is_last)
    first = np.zeros_like(last)
    first[1:] = np.where(row[1:] == row[:-1], last[:-1] + 1, 0)
    returns = {}
    for name, values in _rewards(batch).items():
        returns[name] = np.where(valid[..., None], values, 0).astype(np.float64)
        returns[name] = returns[name].reshape(size * frames, -1)
        if len(row):
            returns[name] = np.add.reduceat(returns[name], row * frames + first)
    terminated = _array(batch["next", "terminated"])[..., 0][row, last]
    table = EpisodeTable(row, last, last + 1 - first, terminated, returns)
    return table, first, done[row, last]


def valid_frames(batch: "TensorDictBase") -> list[int]:
    """Return the number of valid frames of each row; they are the first ones."""
    if VALID in batch.keys(include_nested=True):
        return [int(count) for count in _array(batch[VALID]).sum(-1)]
    size, frames = batch.shape[:2]
    return [frames] * size


def first_frames(batch: "TensorDictBase") -> NDArray[Any] | None:
    """Return which frames begin an episode, None if the batch does not say.

    A collector that has run before delivers the rest of an episode first.
    """
    if "step_count" in batch.keys():
        return _array(batch["step_count"])[..., 0] == 0
    if "is_init" in batch.keys():
        return _array(batch["is_init"])[..., 0]
    return None


def _rewards(batch: "TensorDictBase") -> dict[str, NDArray[Any]]:
    """Return the rewards ``[B, T, n]`` of each group, in the order of keys."""
    rewards: dict[str, NDArray[Any]] = {}
    for name, value in sorted(batch["next"].items()):
        if hasattr(value, "keys") and "reward" in value.keys():
            rewards[name] = _array(value["reward"])[..., 0]
    return rewards


def _array(tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
