"""Policies that several tests use."""

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


def level_policy() -> TensorDictModule:
    return TensorDictModule(
        Level(),
        in_keys=[("prey", "observation")],
        out_keys=[("prey", "action"), ("hunter", "action")],
    )
