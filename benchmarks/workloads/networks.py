"""The networks, with the same weights for everybody."""

import torch
from torch import nn

from workloads.table import Group

CELLS = 64
_PICTURE = 88
_CONV_OUT = 9


class Greedy(nn.Module):
    """The best of discrete actions."""

    pure_forward = True  # Our collectors may repeat what it does.

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the index of the largest logit, int64."""
        return logits.argmax(-1)


class Pictures(nn.Module):
    """A small convolutional network on ``[..., 88, 88, 3]`` uint8."""

    pure_forward = True

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 8, 4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * _CONV_OUT * _CONV_OUT, 256),
            nn.ReLU(),
            nn.Linear(256, actions),
        )

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        """Return logits ``[..., actions]``."""
        leading = picture.shape[:-3]
        flat = picture.reshape(-1, _PICTURE, _PICTURE, 3)
        pixels = flat.permute(0, 3, 1, 2).to(torch.float32) / 255
        return self.layers(pixels).reshape(*leading, -1)


def shared(group: Group) -> nn.Sequential:
    """Return the network that all agents of a group share."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Linear(group.inputs, CELLS),
        nn.Tanh(),
        nn.Linear(CELLS, CELLS),
        nn.Tanh(),
        nn.Linear(CELLS, group.actions),
    ]
    return nn.Sequential(*layers, last(group))


def pictures(group: Group) -> nn.Sequential:
    """Return the convolutional network that all agents of a group share."""
    torch.manual_seed(0)
    return nn.Sequential(Pictures(group.actions), last(group))


def last(group: Group) -> nn.Module:
    """Return what turns a network's output into an action; nothing is drawn."""
    return Greedy() if group.discrete else nn.Tanh()
