"""Actions that are greedy in values, or random with a small probability."""

from typing import final

import torch
from torch import Tensor, nn

_EDGE = 1e-6


@final
class EpsilonGreedyLogits(nn.Module):
    """Logits of the policy that takes a random legal action with probability epsilon.

    The mode is the best action, so deterministic actions are greedy. Epsilon is a
    buffer, so it reaches workers together with the weights.

    Args:
        epsilon: initial value, in [0, 1].
    """

    pure_forward = True

    epsilon: Tensor

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(epsilon))

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map values ``[*B, n_agents, n_actions]`` to logits of the same shape.

        Args:
            values: values of the actions.
            mask: legal actions; None if all are legal.
        """
        legal = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        best = values.masked_fill(legal == 0, float("-inf")).argmax(-1, keepdim=True)
        chance = self.epsilon * legal / legal.sum(-1, keepdim=True)
        greedy = torch.zeros_like(values).scatter(-1, best, 1.0)
        # _EDGE keeps the best action the mode if all actions are equally likely. The
        # clamp gives actions with probability 0 a finite logit.
        return (chance + (1 - self.epsilon + _EDGE) * greedy).clamp_min(1e-12).log()
