"""Recurrent cells, for a shared network or for one network per agent.

A cell consists of two linear layers and arithmetic on the last dimension. With plain
linear layers it takes ``[rows, features]``, with stacked ones ``[n_agents, rows,
features]``.
"""

import abc
import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from marl_collect.policies.fused.elementary import gru_step, lstm_step

States = tuple[Tensor, ...]


class Cell(nn.Module, abc.ABC):
    """One layer of a recurrent network.

    Attributes:
        input: maps the input to the gates; can be applied to many time steps at once.
        hidden: maps the hidden state to the gates.
    """

    n_gates: int

    def __init__(
        self,
        n_inputs: int | None,
        hidden_size: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        gates = self.n_gates * hidden_size
        self.hidden_size = hidden_size
        self.input: nn.Module = (
            nn.LazyLinear(gates, device=device)
            if n_inputs is None
            else nn.Linear(n_inputs, gates, device=device)
        )
        self.hidden: nn.Module = nn.Linear(hidden_size, gates, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights as ``nn.GRU`` and ``nn.LSTM`` do."""
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            if not is_lazy(parameter):
                nn.init.uniform_(parameter, -bound, bound)

    @abc.abstractmethod
    def forward(self, projected: Tensor, states: States) -> States:
        """Compute one time step.

        Args:
            projected: ``self.input(x)``, ``[*, n_gates * hidden_size]``.
            states: tensors ``[*, hidden_size]``: one of a GRU, two of an LSTM.

        Returns:
            The new states; the first is the output.
        """


@final
class GRUCell(Cell):
    """A gated recurrent unit, with the gates and weights of ``nn.GRU``."""

    pure_forward = True
    by_row = True

    n_gates = 3

    @override
    def forward(self, projected: Tensor, states: States) -> States:
        (h,) = states
        return (gru_step(projected, self.hidden(h), h),)


@final
class LSTMCell(Cell):
    """A long short-term memory, with the gates and weights of ``nn.LSTM``."""

    pure_forward = True
    by_row = True

    n_gates = 4

    @override
    def forward(self, projected: Tensor, states: States) -> States:
        h, c = states
        return lstm_step(projected + self.hidden(h), c)
