"""``ReplayBuffer``: the newest frames of each environment, or their episodes."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from marl_collect.core.tensordicts import indexable, rows_of


@final
class ReplayBuffer:
    """The newest frames of each environment, drawn as frames or as whole episodes.

    Each environment has a ring of the same length, in which its frames lie in the
    order in which they were collected. An episode is a range of it, even if several
    batches brought parts of the episode.

    A draw is int64 ``[S, 3]`` on the CPU: environment, number of the first frame, which
    counts all frames collected in the environment, and number of frames.

    Args:
        frames: capacity, over all environments; rounded up to equal rings.
        device: of the frames.
        whole: whether whole episodes are drawn.
    """

    def __init__(self, frames: int, device: torch.device, *, whole: bool) -> None:
        self.frames = frames
        self.whole = whole
        self._device = device
        self._columns: dict[str, Tensor] = {}
        """Rings ``[B, length, ...]`` by name."""
        self._collected = 0
        """Number of frames of each environment so far."""
        with torch.device("cpu"):
            self._episodes = torch.empty(0, 3, dtype=torch.long)
            """Draws of the whole episodes in the rings."""
            self._begins = torch.empty(0, dtype=torch.long)
            """Number of the first frame of each environment's latest episode."""
            self._ids = torch.empty(0, dtype=torch.long)
            """Number of this episode, as the collector counts them."""
            self._environments = torch.empty(0, dtype=torch.long)
            """Index of each environment."""

    def __len__(self) -> int:
        """Return the number of frames in the buffer."""
        return len(self._begins) * self._filled

    def extend(self, data: Mapping[str, Tensor], ends: Tensor, ids: Tensor) -> int:
        """Add a batch, in place of the oldest frames if there is no room.

        Args:
            data: what is stored of the frames, ``[B, T, ...]``.
            ends: whether an episode ends after the frame, bool ``[B, T]``.
            ids: number of the episode, int64 ``[B, T]``. A new number where no episode
                ended tells that the rest of the last one is missing.

        Returns:
            The number of episodes that end in the batch.

        Raises:
            ValueError: if the number of environments changes, or if whole episodes are
                drawn and the batch is of other environments, or an episode of the batch
                does not fit into its ring.
        """
        n_envs, n_frames = ends.shape
        environments = ids[:, 0].cpu() >> 32
        if not self._columns:
            self._allocate(data, n_envs)
            self._environments = environments
        if n_envs != len(self._begins):
            raise ValueError(
                f"Batches come from {len(self._begins)} environments, but this one "
                f"comes from {n_envs}. Use the same collector, or a new learner."
            )
        if self.whole and not torch.equal(environments, self._environments):
            raise ValueError(
                "Whole episodes are replayed, so all batches must be of the same "
                f"environments, but after {self._environments.tolist()} this one is of "
                f"{environments.tolist()}: use a Collector or MultiSyncCollector, or "
                "trajs_per_batch."
            )
        length, stop = self._length, self._collected + n_frames
        fits = min(n_frames, length)
        places = torch.arange(stop - fits, stop, device=self._device) % length
        for name, column in self._columns.items():
            newest = indexable(data[name][:, -fits:])
            indexable(column)[:, places] = newest.to(self._device)
        ended = self._note_episodes(ends.cpu(), ids.cpu())
        self._collected = stop
        oldest = stop - length
        # Long episodes would be missing among the draws, and nobody would notice.
        if self.whole and int(torch.cat([ended[:, 1], self._begins]).min()) < oldest:
            raise ValueError(
                f"An episode, with the frames that were collected after it in the same "
                f"batch, has more than {length} frames, so it does not fit into its "
                f"environment's part of value.buffer_frames={self.frames}. Raise it, "
                "collect smaller batches, or limit episodes with max_frames_per_traj."
            )
        episodes = torch.cat([self._episodes, ended])
        self._episodes = episodes[episodes[:, 1] >= oldest]
        return len(ended)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw frames or episodes at random, each of them equally likely.

        Args:
            count: how many; the same one may be drawn several times.
            generator: on the CPU.

        Raises:
            ValueError: if there is no whole episode to draw.
        """
        if self.whole:
            if not len(self._episodes):
                raise ValueError(
                    f"No whole episode is in the replay buffer, which has room for "
                    f"{self._length} frames of each environment. Raise "
                    f"value.buffer_frames={self.frames}."
                )
            total = len(self._episodes)
        else:
            total = len(self)
        chosen = torch.randint(total, (count,), generator=generator, device="cpu")
        if self.whole:
            return self._episodes[chosen]
        filled = self._filled
        first = self._collected - filled + chosen % filled
        return torch.stack([chosen // filled, first, torch.ones_like(first)], -1)

    def take(self, drawn: Tensor) -> dict[str, Tensor]:
        """Return what is stored of a draw ``[S, 3]``.

        Returns:
            ``[S, T, ...]`` by name, with ``T`` frames of the longest sequence. Others
            repeat their last frame; ``"inside"``, bool ``[S, T]``, is False there.
        """
        env, first, length = drawn.unsqueeze(-1).unbind(-2)
        steps = torch.arange(int(length.max()), device="cpu")
        inside = steps < length
        frame = (first + torch.minimum(steps, length - 1)) % self._length
        rows = (env * self._length + frame).flatten().to(self._device)
        data = {
            name: rows_of(column.flatten(0, 1), rows).unflatten(0, inside.shape)
            for name, column in self._columns.items()
        }
        return data | {"inside": inside.to(self._device)}

    def state_dict(self) -> dict[str, Any]:
        """Return all frames, without the room that is empty."""
        filled = self._filled
        return {
            "frames": self.frames,
            "whole": self.whole,
            "columns": {  # A slice would be saved with all of its ring.
                name: column[:, :filled].clone() if filled < self._length else column
                for name, column in self._columns.items()
            },
            "collected": self._collected,
            "episodes": self._episodes,
            "begins": self._begins,
            "ids": self._ids,
            "environments": self._environments,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` of a buffer with the same arguments.

        Raises:
            ValueError: if it is of another; nothing is changed.
        """
        self.check(state)
        self._columns = {}
        if state["columns"]:
            self._allocate(state["columns"], len(state["begins"]))
            for name, column in self._columns.items():
                saved = state["columns"][name]
                column[:, : saved.shape[1]] = saved.to(self._device)
        self._collected = state["collected"]
        self._episodes = state["episodes"]
        self._begins, self._ids = state["begins"], state["ids"]
        self._environments = state["environments"]

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a ``state_dict`` fits.

        Raises:
            ValueError: if it is of a buffer with other arguments; says which.
        """
        kinds = {True: "episodes", False: "frames"}
        saved, current = (
            f"has value.buffer_frames={frames} and replays {kinds[whole]}"
            for frames, whole in (
                (state["frames"], state["whole"]),
                (self.frames, self.whole),
            )
        )
        if saved != current:
            raise ValueError(
                f"The saved replay buffer {saved}, but this one {current}. Use the "
                "options with which it was saved."
            )

    @property
    def _length(self) -> int:
        """Return the number of frames in a ring."""
        return -(-self.frames // max(1, len(self._begins)))

    @property
    def _filled(self) -> int:
        return min(self._collected, self._length)

    def _allocate(self, data: Mapping[str, Tensor], n_envs: int) -> None:
        with torch.device("cpu"):
            self._begins = torch.zeros(n_envs, dtype=torch.long)
            self._ids = torch.full_like(self._begins, -1)
        self._columns = {
            name: torch.empty(
                n_envs,
                self._length,
                *value.shape[2:],
                dtype=value.dtype,
                device=self._device,
            )
            for name, value in data.items()
        }

    def _note_episodes(self, ends: Tensor, ids: Tensor) -> Tensor:
        """Note where episodes begin; return draws of those that end in a batch."""
        begins = torch.where(ids[:, 0] == self._ids, self._begins, self._collected)
        envs, frames = ends.nonzero(as_tuple=True)
        stops = self._collected + frames + 1
        # In the order of environments and frames: an episode begins where the one
        # before it ended, unless that was another environment's.
        firsts = torch.cat([stops[:1], stops[:-1]])
        is_first = torch.ones_like(envs, dtype=torch.bool)
        is_first[1:] = envs[1:] != envs[:-1]
        firsts = torch.where(is_first, begins[envs], firsts)
        self._begins = begins.scatter_reduce(0, envs, stops, "amax")
        # The id of the next frame is not known if an episode ended last.
        self._ids = torch.where(ends[:, -1], -1, ids[:, -1])
        return torch.stack([envs, firsts, stops - firsts], -1)
