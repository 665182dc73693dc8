"""Records a step of ``torch.gru`` and ``torch.lstm`` as elementary operations.

torch computes whole sequences in one call, which takes tens of microseconds for the
single step of a frame and allocates its results. Products, sigmoids and tangents can be
repeated into given memory, and by numpy.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

States = tuple[Tensor, ...]
Weights = Sequence[Tensor]


@final
class SingleSteps(TorchFunctionMode):
    """Computes single steps in elementary operations while this context is open.

    Several steps, packed sequences, both directions, dropout in training and
    projections are left to torch.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace ``torch.gru`` and ``torch.lstm``."""
        del types
        cell = _CELLS.get(func)
        if cell is not None and not kwargs:
            result = _step(cell, args)
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


def _step(cell: "_Cell", args: tuple[Any, ...]) -> States | None:
    """Return what torch's function returns; None if the call is no plain step."""
    if len(args) != 9 or not isinstance(args[3], bool):  # A packed sequence.
        return None
    x, initial, weights, has_biases, layers, dropout, train, both, batch_first = args
    states = (initial,) if isinstance(initial, Tensor) else tuple(initial)
    per_layer = 4 if has_biases else 2
    if both or (dropout and train) or len(weights) != per_layer * layers:
        return None
    time = 1 if batch_first else 0
    if x.ndim != 3 or x.shape[time] != 1:
        return None
    out = x.squeeze(time)
    after: list[States] = []
    for layer in range(layers):
        begin = per_layer * layer
        before = tuple(state[layer] for state in states)
        after.append(cell(out, before, weights[begin : begin + per_layer]))
        out = after[-1][0]
    stacked = (torch.stack(kind) for kind in zip(*after, strict=True))
    return (out.unsqueeze(time), *stacked)


def _gates(x: Tensor, h: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return what input and hidden state add to the gates."""
    input_weight, hidden_weight = weights[:2]
    input_bias, hidden_bias = weights[2:] or (None, None)
    return linear(x, input_weight, input_bias), linear(h, hidden_weight, hidden_bias)


def _gru(x: Tensor, states: States, weights: Weights) -> States:
    """Compute one step, as documented for ``torch.nn.GRU``."""
    (h,) = states
    from_input, from_state = _gates(x, h, weights)
    x_reset, x_update, x_new = from_input.chunk(3, -1)
    h_reset, h_update, h_new = from_state.chunk(3, -1)
    reset = torch.sigmoid(x_reset + h_reset)
    update = torch.sigmoid(x_update + h_update)
    new = torch.tanh(torch.addcmul(x_new, reset, h_new))
    return (torch.lerp(new, h, update),)


def _lstm(x: Tensor, states: States, weights: Weights) -> States:
    """Compute one step, as documented for ``torch.nn.LSTM``."""
    h, c = states
    from_input, from_state = _gates(x, h, weights)
    write, keep, new, out = (from_input + from_state).chunk(4, -1)
    remembered = torch.sigmoid(keep) * c
    c = torch.addcmul(remembered, torch.sigmoid(write), torch.tanh(new))
    return torch.sigmoid(out) * torch.tanh(c), c


_Cell = Callable[[Tensor, States, Weights], States]
_CELLS: dict[Any, _Cell] = {torch.gru: _gru, torch.lstm: _lstm}
