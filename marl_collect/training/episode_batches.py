"""Batches of whole episodes, for learners that ask for them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, final

import numpy as np
from tensordict import TensorDictBase

from marl_collect.buffers.layout import TRAJ_IDS, VALID
from marl_collect.buffers.trajectories import TrajectoryAssembler
from marl_collect.collectors.collector import CollectorBase
from marl_collect.collectors.statistics import Statistics
from marl_collect.rollout.episodes import Episode


@final
class EpisodeBatches:
    """Collects batches of whole episodes that begin with the newest weights.

    All environments begin a new episode for each batch, and every environment
    contributes equally many: its first ones. A batch of those that end first would have
    more short episodes than the policy plays. Frames that environments collect until
    the others have finished are dropped and not counted.
    """

    def __init__(self, collector: CollectorBase, episodes: int) -> None:
        """Use a collector of batches ``[B, T]``, which need not have whole episodes.

        Args:
            collector: without ``total_frames`` and ``prefetch``.
            episodes: per batch; a multiple of the number of environments.
        """
        self._collector = collector
        self._episodes = episodes
        self._wanted = np.zeros(0, np.int64)
        self._assembler = TrajectoryAssembler(lambda ids: np.isin(ids, self._wanted))
        self._statistics = Statistics()

    @property
    def frames(self) -> int:
        """Frames of all batches so far."""
        return self._statistics.frames

    def next(self) -> TensorDictBase:
        """Return the next batch.

        Returns:
            ``[episodes, longest]``, with ``("collector", "mask")``, in the order in
            which the episodes ended.

        Raises:
            RuntimeError: if an episode does not end; see ``TrajectoryAssembler``.
        """
        self._collector.reset()
        self._assembler.drop_open()
        begun = False
        while len(self._assembler) < self._episodes:
            part = self._collector.next()
            assert part is not None  # There is no last one.
            if not begun:
                following = np.arange(self._episodes // len(part))
                self._wanted = part[TRAJ_IDS][:, :1].cpu().numpy() + following
                begun = True
            self._assembler.add(part)
        batch = self._assembler.take("padded")
        self._count(batch)
        return batch

    def _count(self, batch: TensorDictBase) -> None:
        valid = batch[VALID]
        returns = {
            name: value["reward"].squeeze(-1).double().sum(1).tolist()
            for name, value in batch["next"].items()
            if isinstance(value, TensorDictBase) and "reward" in value.keys()
        }  # Padding is 0.
        environments = (batch[TRAJ_IDS][:, 0] >> 32).tolist()
        lengths = valid.sum(1).tolist()
        episodes = [
            Episode(
                environments[row],
                lengths[row],
                {name: tuple(values[row]) for name, values in returns.items()},
            )
            for row in range(len(batch))
        ]
        self._statistics.add(sum(lengths), episodes, seconds=0.0)

    def update_policy_weights_(self) -> None:
        """Publish the policy's weights for the next batch."""
        self._collector.update_policy_weights_()

    def stats(self) -> dict[str, Any]:
        """Return ``stats`` of a collector that plays these episodes only."""
        return self._statistics.snapshot()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which new batches resume exactly."""
        statistics = self._statistics
        return {
            "collector": self._collector.state_dict(),
            "frames": statistics.frames,
            "batches": statistics.batches,
            "episodes": statistics.episodes,
            "recent": [asdict(episode) for episode in statistics.recent],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict``.

        Raises:
            KeyError: if the mapping is not such a state.
        """
        self._collector.load_state_dict(state["collector"])
        statistics = self._statistics
        statistics.frames = state["frames"]
        statistics.batches = state["batches"]
        statistics.episodes = state["episodes"]
        statistics.recent = [Episode(**episode) for episode in state["recent"]]
