"""Exploration by chance, as logits: any head then draws it, with its own noise."""

from typing import final

import torch
from torch import Tensor, nn

_EDGE = 1e-6


@final
class EpsilonGreedyLogits(nn.Module):
    """Logits of the policy that takes a random legal action with probability epsilon.

    Its mode is the best action, so deterministic acting is greedy. Epsilon is a buffer:
    it reaches workers as weights do.

    Args:
        epsilon: in [0, 1], before anything changes it.
    """

    epsilon: Tensor

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(epsilon))

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map values ``[*B, n_agents, n_actions]`` to logits of the same shape.

        Args:
            values: of the actions.
            mask: which of them are legal, all if not given.
        """
        legal = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        best = values.masked_fill(legal == 0, float("-inf")).argmax(-1, keepdim=True)
        chance = self.epsilon * legal / legal.sum(-1, keepdim=True)
        greedy = torch.zeros_like(values).scatter(-1, best, 1.0)
        # The best action stays the mode where all are as likely, and an action that is
        # never taken has a finite logit.
        return (chance + (1 - self.epsilon + _EDGE) * greedy).clamp_min(1e-12).log()
