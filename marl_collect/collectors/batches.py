"""Filled slots, and batches that view their memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from marl_collect.buffers.compact_observations import LastObservations, attach
from marl_collect.core.description import EnvDescription, Key
from marl_collect.core.tensordicts import assemble
from marl_collect.rollout.episodes import Episode


@dataclass(frozen=True)
class Filled:
    """One filled slot.

    Attributes:
        tensors: ``[B, T, ...]`` per key; views of the slot's memory.
        ends: number of valid frames of each environment; T unless the batch is ragged.
        episodes: the episodes that ended in it.
        sizes: number of environments of each worker in it.
        last: the observations that ``compact_obs`` stores separately.
    """

    tensors: Mapping[Key, torch.Tensor]
    ends: list[int]
    episodes: list[Episode]
    sizes: Sequence[int]
    last: LastObservations | None = None

    @property
    def frames(self) -> int:
        """Number of valid frames of all environments."""
        return sum(self.ends)


def as_batch(filled: Filled, description: EnvDescription) -> TensorDict:
    """Return a slot's tensors as a TensorDict ``[B, T]``, without copying."""
    n_agents = {name: group.n_agents for name, group in description.groups.items()}
    size = tuple(filled.tensors["done",].shape[:2])
    batch = assemble(filled.tensors, size, n_agents, time=True)
    return attach(batch, filled.last)


def set_truncated(filled: Filled, groups: list[str]) -> None:
    """Mark each environment's last valid frame, and the agents alive in it."""
    rows = torch.arange(len(filled.ends))
    last = torch.tensor(filled.ends) - 1
    for at in [(), *((group,) for group in groups)]:
        done = filled.tensors["next", *at, "done"]
        truncated = filled.tensors["next", *at, "truncated"]
        truncated[rows, last] |= ~done[rows, last]
        done[rows, last] = True
