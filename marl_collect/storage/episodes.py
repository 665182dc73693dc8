"""Finds the episodes in a stream of batches."""

from collections.abc import Iterable, Mapping
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
        self._torn: set[int] = set()
        """Trajectories that lack frames."""
        self._torn_rows = False
        """Whether the first trajectory of every row lacks frames, if it has no id."""

    def leave_out(self, trajectories: Iterable[int]) -> None:
        """Note that a batch is missing; episodes that cross it are never returned.

        Args:
            trajectories: ids of the frames of the missing batch.
        """
        self._torn |= set(trajectories)
        for running in self._running.values():
            running.whole = False
            if running.trajectory is not None:
                self._torn.add(running.trajectory)
        self._torn_rows = True

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
                if begin == 0 and trajectory is None and self._torn_rows:
                    running.whole = False
                if t < frames:
                    if running.whole:
                        ended.append(_ended(b, t, bool(terminated[b, t]), running))
                    del self._running[b]
                    if trajectory is not None:
                        self._begun.pop(trajectory >> 32, None)
                        self._last_ended[trajectory >> 32] = trajectory
                begin = end
        self._torn_rows = False
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
            whole = is_first and trajectory not in self._torn
            running = self._running[b] = _Running(trajectory, 0, {}, whole)
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
