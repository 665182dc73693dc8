"""Numbers the frames of episodes in a stream of batches, and finds those that end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import STEP_COUNT, TRAJ_IDS
from marl_collect.core.description import Key
from marl_collect.core.signature import IS_INIT
from marl_collect.storage.columns import DONE, TERMINATED, Rows, flat_rows

_UNSEEN: Final = -1
"""Number of frames whose episode began before the first batch."""


@final
@dataclass(frozen=True)
class EndedEpisode:
    """An episode of which every frame is known.

    Attributes:
        traj_id: its trajectory.
        length: in frames.
        terminated: whether the environment ended it; otherwise it was truncated.
        returns: undiscounted sum of rewards of each agent, by group.
    """

    traj_id: int
    length: int
    terminated: bool
    returns: Mapping[str, tuple[float, ...]]

    @property
    def environment(self) -> int:
        """Number of its environment."""
        return self.traj_id >> 32

    @property
    def team_return(self) -> float:
        """Sum over all agents."""
        return sum(map(sum, self.returns.values()))


Progress = Callable[[int, int, Sequence[EndedEpisode]], None]
"""Called before the first frame and from time to time: frames so far, frames in total,
and the episodes among those since the last call."""


def no_progress(done: int, total: int, ended: Sequence[EndedEpisode]) -> None:
    """Show nothing."""
    del done, total, ended


@final
@dataclass
class EpisodeTracker:
    """Follows the trajectories of one run.

    Attributes:
        running: frames so far and returns of the trajectories that have not ended.
        latest: each environment's trajectory that came last; it has ended if it is
            not in ``running``.
    """

    running: dict[int, tuple[int, dict[str, NDArray[np.float64]]]] = field(
        default_factory=dict
    )
    latest: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Self:
        """Return a tracker that can be advanced without changing this one."""
        return type(self)(dict(self.running), dict(self.latest))

    def add(
        self, rows: Rows, *, whole: bool = False
    ) -> tuple[NDArray[np.int32], list[EndedEpisode]]:
        """Return the number of each frame of a batch, and the episodes that ended.

        Args:
            rows: of the batch.
            whole: whether all its episodes are known to be complete.
        """
        by_key = {column.key: values for column, values in rows.items()}
        ids, done = by_key[TRAJ_IDS], by_key[DONE].reshape(-1)
        order = np.argsort(ids, kind="stable")
        arranged = ids[order]
        first = np.flatnonzero(np.append(True, arranged[1:] != arranged[:-1]))
        continues = done[order]
        continues[np.append(first[1:], len(ids)) - 1] = False
        if continues.any():
            raise ValueError(_continues(int(arranged[continues][0])))
        sums = {
            column.key[1]: np.add.reduceat(flat_rows(values)[order], first, dtype=float)
            for column, values in rows.items()
            if column.is_reward and len(column.key) == 3
        }
        terminated = by_key.get(TERMINATED)
        first_steps = _first_steps(by_key)
        begins = np.ones_like(done) if whole else self._begins(ids, first_steps)
        index = np.empty(len(ids), np.int32)
        ended: dict[int, EndedEpisode] = {}
        for piece, (start, end) in enumerate(pairwise([*first.tolist(), len(ids)])):
            where, traj_id = order[start:end], int(arranged[start])
            last = int(where[-1])
            again = first_steps is not None and bool(first_steps[where[0]])
            self._check_number(traj_id, is_first_step=again)
            self.latest[traj_id >> 32] = traj_id
            begin = 0 if begins[where[0]] else _UNSEEN
            before, sofar = self.running.pop(traj_id, (begin, {}))
            returns = {
                name: values[piece] + sofar.get(name, 0)
                for name, values in sums.items()
            }
            is_known = before != _UNSEEN
            length = before + end - start if is_known else _UNSEEN
            index[where] = np.arange(before, length) if is_known else _UNSEEN
            if not done[last]:
                self.running[traj_id] = (length, returns)
            elif is_known:
                _check_finite(traj_id, returns)
                is_end = terminated is not None and bool(terminated[last].any())
                agents = {name: tuple(r.tolist()) for name, r in returns.items()}
                ended[last] = EndedEpisode(traj_id, length, is_end, agents)
        return index, [ended[last] for last in sorted(ended)]

    def _begins(
        self, ids: NDArray[np.int64], first_steps: NDArray[np.bool_] | None
    ) -> NDArray[np.bool_]:
        """Return which frames begin an episode, if they are the first of their id.

        A collector that has run before delivers the rest of an episode first. If no key
        says which frames begin one, an environment's episode 0 begins with its first
        frame, unless another environment is already in a later one.
        """
        if first_steps is not None:
            return first_steps
        first: dict[int, int] = {}  # Of the environments that are new.
        for traj_id in dict.fromkeys(ids.tolist()):
            if traj_id >> 32 not in self.latest:
                first.setdefault(traj_id >> 32, traj_id)
        is_fresh = not any(traj_id & 0xFFFFFFFF for traj_id in first.values())
        return ~np.isin(ids, [] if is_fresh else [*first.values()])

    def _check_number(self, traj_id: int, *, is_first_step: bool) -> None:
        latest = self.latest.get(traj_id >> 32, traj_id - 1)
        is_running = traj_id in self.running
        if latest == traj_id and not is_running:
            raise ValueError(_continues(traj_id))
        if latest > traj_id or (is_running and is_first_step):
            raise ValueError(
                f"{_name(traj_id)} comes after frames of its episode "
                f"{latest & 0xFFFFFFFF}, but numbers increase within a run, and two "
                "episodes of one number would be joined. A collector's set_seed and "
                "load_state_dict begin such numbers again: open a new Writer after "
                "them. Add batches in the order in which they were collected."
            )


def _first_steps(by_key: Mapping[Key, NDArray[Any]]) -> NDArray[np.bool_] | None:
    """Return which frames begin an episode, None if no key says so."""
    if STEP_COUNT in by_key:
        return flat_rows(by_key[STEP_COUNT])[:, 0] == 0
    if IS_INIT in by_key:
        return flat_rows(by_key[IS_INIT])[:, 0].astype(np.bool_)
    return None


def _check_finite(traj_id: int, returns: Mapping[str, NDArray[np.float64]]) -> None:
    for name, values in returns.items():
        if not np.isfinite(values).all():
            agent = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(
                f"{_name(traj_id)} has the return {values[agent]} of agent {agent} of "
                f"the group {name!r}. Returns must be finite, so the batch was not "
                "written. Look for a reward that is NaN or infinite."
            )


def _continues(traj_id: int) -> str:
    return (
        f"{_name(traj_id)} continues after a frame whose ('next', 'done') is True. "
        "set_truncated=True causes this: the pieces would be listed as whole episodes. "
        "Omit it. max_frames_per_traj limits the length of episodes."
    )


def _name(traj_id: int) -> str:
    return f"Episode {traj_id & 0xFFFFFFFF} of environment {traj_id >> 32}"
