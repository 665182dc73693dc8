"""Finds the episodes in a stream of batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.buffers.layout import TRAJ_IDS, VALID


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


@final
@dataclass(frozen=True)
class EpisodeTable:
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
    def of(
        cls, episodes: Sequence[EndedEpisode], rewards: Mapping[str, int]
    ) -> "EpisodeTable":
        """Return a table; ``rewards`` are the groups and their numbers of agents."""
        rows = [(e.environment, e.frame, e.length, e.terminated) for e in episodes]
        table = np.array(rows, np.int64).reshape(-1, 4)
        returns = {
            name: np.array([e.returns[name] for e in episodes]).reshape(-1, agents)
            for name, agents in rewards.items()
        }
        environment, frame, length, terminated = table.T
        return cls(environment, frame, length, terminated.astype(np.bool_), returns)

    @classmethod
    def joined(
        cls, tables: Sequence["EpisodeTable"], rewards: Mapping[str, int]
    ) -> "EpisodeTable":
        """Return the episodes of all tables."""
        if not tables:
            return cls.of([], rewards)
        return cls(
            np.concatenate([t.environment for t in tables]),
            np.concatenate([t.frame for t in tables]),
            np.concatenate([t.length for t in tables]),
            np.concatenate([t.terminated for t in tables]),
            {n: np.concatenate([t.returns[n] for t in tables]) for n in rewards},
        )

    @staticmethod
    def entry_size(rewards: Mapping[str, int]) -> int:
        """Return the bytes of an episode in ``to_bytes``."""
        return 17 + 8 * sum(rewards.values())

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.length)

    def take(self, chosen: NDArray[np.int64]) -> "EpisodeTable":
        """Return some of the episodes."""
        return EpisodeTable(
            self.environment[chosen],
            self.frame[chosen],
            self.length[chosen],
            self.terminated[chosen],
            {name: values[chosen] for name, values in self.returns.items()},
        )

    @property
    def team_returns(self) -> NDArray[np.float64]:
        """Sum over all agents."""
        sums = np.zeros(len(self))
        for values in self.returns.values():
            sums += values.sum(1)
        return sums

    def episodes(self) -> list[EndedEpisode]:
        """Return the episodes as objects."""
        returns = {name: values.tolist() for name, values in self.returns.items()}
        columns = zip(
            self.environment.tolist(),
            self.frame.tolist(),
            self.length.tolist(),
            self.terminated.tolist(),
            strict=True,
        )
        return [
            EndedEpisode(
                environment,
                frame,
                length,
                terminated,
                {name: tuple(values[i]) for name, values in returns.items()},
            )
            for i, (environment, frame, length, terminated) in enumerate(columns)
        ]

    def to_bytes(self) -> bytes:
        """Return the table as it is stored in a batch."""
        columns = [
            self.environment.astype("<u4"),
            self.frame.astype("<u4"),
            self.length.astype("<u8"),
            self.terminated.astype(np.uint8),
            *(values.astype("<f8") for values in self.returns.values()),
        ]
        return b"".join(column.tobytes() for column in columns)

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


@dataclass
class _Running:
    """The part of an environment's running episode that is in earlier batches."""

    trajectory: int | None
    length: int
    returns: dict[str, NDArray[np.float64]]
    whole: bool = True


@final
class EpisodeFinder:
    """Follows episodes from batch to batch."""

    def __init__(self) -> None:
        """Begin with no episode running."""
        self._running: dict[int, _Running] = {}
        self._begun: dict[int, int] = {}
        """Each environment's trajectory that began last, unless it has ended."""
        self._last_ended: dict[int, int] = {}
        """Each environment's trajectory that ended last."""

    def add(self, batch: TensorDictBase) -> list[EndedEpisode]:
        """Return the episodes that ended in ``batch``, a ``[B, T]`` of a collector.

        Raises:
            ValueError: if an episode continues in another row, after another episode
                of its row, or after its end.
        """
        done = _array(batch["next", "done"])[..., 0]
        terminated = _array(batch["next", "terminated"])[..., 0]
        ids: NDArray[Any] | None = None
        if TRAJ_IDS in batch.keys(include_nested=True):
            ids = _array(batch[TRAJ_IDS])
        rewards = _rewards(batch)
        begun = first_frames(batch)
        ended: list[EndedEpisode] = []
        for b, frames in enumerate(valid_frames(batch)):
            begin = 0
            for t in [*np.flatnonzero(done[b, :frames]).tolist(), frames]:
                end = min(t + 1, frames)
                if begin == end:
                    continue
                trajectory = None if ids is None else int(ids[b, begin])
                is_first = begun is None or bool(begun[b, begin])
                running = self._continue(b, trajectory, is_first=is_first)
                running.length += end - begin
                for name, values in rewards.items():
                    total = values[b, begin:end].sum(0, dtype=np.float64)
                    running.returns[name] = running.returns.get(name, 0.0) + total
                if t < frames:
                    if running.whole:
                        ended.append(_ended(b, t, bool(terminated[b, t]), running))
                    del self._running[b]
                    if trajectory is not None:
                        self._begun.pop(trajectory >> 32, None)
                        self._last_ended[trajectory >> 32] = trajectory
                begin = end
        return ended

    def _continue(self, b: int, trajectory: int | None, *, is_first: bool) -> _Running:
        """Return the running episode of row ``b``.

        Args:
            b: the row.
            trajectory: its id, None if the batch has none.
            is_first: whether its next frame may be the first of an episode.
        """
        running = self._running.get(b)
        if running is None or running.trajectory != trajectory:
            if trajectory is not None:
                self._begin(b, trajectory)
            running = self._running[b] = _Running(trajectory, 0, {}, is_first)
        return running

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


def valid_frames(batch: TensorDictBase) -> list[int]:
    """Return the number of valid frames of each row; they are the first ones."""
    if VALID in batch.keys(include_nested=True):
        return [int(count) for count in _array(batch[VALID]).sum(-1)]
    size, frames = batch.shape[:2]
    return [frames] * size


def _ended(b: int, frame: int, terminated: bool, running: _Running) -> EndedEpisode:  # noqa: FBT001
    returns = {name: tuple(total.tolist()) for name, total in running.returns.items()}
    return EndedEpisode(b, frame, running.length, terminated, returns)


def first_frames(batch: TensorDictBase) -> NDArray[Any] | None:
    """Return which frames begin an episode, None if the batch does not say.

    A collector that has run before delivers the rest of an episode first.
    """
    if "step_count" in batch.keys():
        return _array(batch["step_count"])[..., 0] == 0
    if "is_init" in batch.keys():
        return _array(batch["is_init"])[..., 0]
    return None


def _rewards(batch: TensorDictBase) -> dict[str, NDArray[Any]]:
    """Return the rewards ``[B, T, n]`` of each group."""
    found: dict[str, NDArray[Any]] = {}
    for name, value in batch["next"].items():
        if isinstance(value, TensorDictBase) and "reward" in value.keys():
            found[name] = _array(value["reward"])[..., 0]
    return found


def _array(tensor: Any) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
