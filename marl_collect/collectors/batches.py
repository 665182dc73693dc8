"""From a filled slot to the batch that the user gets."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from marl_collect.description import EnvDescription, Key
from marl_collect.rollout import Episode
from marl_collect.tensordicts import assemble


@dataclass(frozen=True)
class Filled:
    """One filled slot.

    Attributes:
        tensors: ``[B, T, ...]`` per key, on the slot's memory.
        episodes: those that ended in it.
        versions: the weights versions that acted, lowest and highest.
    """

    tensors: Mapping[Key, torch.Tensor]
    episodes: list[Episode]
    versions: tuple[int, int]

    @property
    def frames(self) -> int:
        """Valid frames, over all environments."""
        return self.tensors["done",][..., 0].numel()


def as_batch(filled: Filled, description: EnvDescription) -> TensorDict:
    """Nest a slot's tensors, without copying, as ``[B, T]`` with a time dimension."""
    n_agents = {name: group.n_agents for name, group in description.groups.items()}
    size = tuple(filled.tensors["done",].shape[:2])
    return assemble(filled.tensors, size, n_agents, time=True)


def set_truncated(tensors: Mapping[Key, torch.Tensor], groups: list[str]) -> None:
    """Flag the last frame of each environment, and each agent alive in it."""
    for at in [(), *((group,) for group in groups)]:
        done = tensors["next", *at, "done"][:, -1]
        tensors["next", *at, "truncated"][:, -1] |= ~done
        done.fill_(True)
