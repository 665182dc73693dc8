"""The networks, with the same weights for everybody."""

import torch
from torch import nn

from workloads.table import Group

CELLS = 64


class Greedy(nn.Module):
    """The best of discrete actions."""

    pure_forward = True  # Our collectors may repeat what it does.

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the index of the largest logit, int64."""
        return logits.argmax(-1)


def shared(group: Group) -> nn.Sequential:
    """Return the network that all agents of a group share; nothing is drawn."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(group.inputs, CELLS),
        nn.Tanh(),
        nn.Linear(CELLS, CELLS),
        nn.Tanh(),
        nn.Linear(CELLS, group.actions),
        Greedy() if group.discrete else nn.Tanh(),
    )
