"""Policies that several tests use."""

from collections.abc import Callable

import torch
from tensordict.nn import TensorDictModule
from torch import nn


class Level(nn.Module):
    """Writes its one weight as every prey's action."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = observation.shape[0]
        hunters = torch.zeros(batch, 2, dtype=torch.int64)
        return self.level.expand(batch, 3, 2), hunters


def acting(module: nn.Module) -> TensorDictModule:
    """Return the policy of a module that takes what prey see, and acts for all."""
    keys = [("prey", "action"), ("hunter", "action")]
    return TensorDictModule(module, in_keys=[("prey", "observation")], out_keys=keys)


def level_policy() -> TensorDictModule:
    return acting(Level())


def at_level(value: float) -> Callable[[], TensorDictModule]:
    """Return a factory of the policy with this weight."""

    def build() -> TensorDictModule:
        policy = level_policy()
        nn.init.constant_(policy.module.level, value)
        return policy

    return build
