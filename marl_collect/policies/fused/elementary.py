"""Replaces functions by operations that can be repeated, or repeated faster.

``torch.gru`` and ``torch.lstm`` compute whole sequences in one call, which takes tens
of microseconds for the single step of a frame and allocates its results. Products,
sigmoids and tangents can be repeated into given memory, and by numpy.

``torch.nn.functional.one_hot`` reads the smallest and the largest index in Python to
check them. Both differ from frame to frame, so no recording would stay valid.
``scatter_``, which writes the ones, checks the indices itself.

``project`` of TorchRL's bounded specs reads in Python whether a value is within its
bounds, and clamps it only if it is not. With noise the answer differs from frame to
frame. Clamping a value that is within its bounds does not change it.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot
from torch.overrides import TorchFunctionMode

States = tuple[Tensor, ...]
Weights = Sequence[Tensor]

ELEMENTWISE = (
    *(nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU),
    *(nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
)
"""Layers that compute every number alone."""


@final
class ElementaryOperations(TorchFunctionMode):
    """Replaces functions in this thread while this context is open.

    Of recurrent networks it replaces single steps. Several steps, packed sequences,
    both directions, dropout in training and projections are left to torch.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the replacement of ``func``, or ``func`` itself."""
        del types
        replacement = _REPLACEMENTS.get(func)
        result = replacement(*args, **(kwargs or {})) if replacement else None
        return func(*args, **(kwargs or {})) if result is None else result


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor | None:  # noqa: A002 - torch's name
    """Encode ``input``; None if torch has to find out the number of classes."""
    if num_classes < 0:
        return None
    zeros = input.new_zeros((*input.shape, num_classes))
    return zeros.scatter_(-1, input.unsqueeze(-1), 1)


def _step(cell: "_Cell", *args: Any, **kwargs: Any) -> States | None:
    """Return what torch's function returns; None if the call is no plain step."""
    # Torch's modules pass all by position. A packed sequence has no flag at index 3.
    if kwargs or len(args) != 9 or not isinstance(args[3], bool):
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
    return (gru_step(*_gates(x, h, weights), h),)


def _lstm(x: Tensor, states: States, weights: Weights) -> States:
    """Compute one step, as documented for ``torch.nn.LSTM``."""
    h, c = states
    from_input, from_state = _gates(x, h, weights)
    return lstm_step(from_input + from_state, c)


def gru_step(x_gates: Tensor, h_gates: Tensor, h: Tensor) -> Tensor:
    """Return the next state of a GRU, from what input and state add to the gates."""
    x_reset, x_update, x_new = x_gates.chunk(3, -1)
    h_reset, h_update, h_new = h_gates.chunk(3, -1)
    reset = torch.sigmoid(x_reset + h_reset)
    update = torch.sigmoid(x_update + h_update)
    new = torch.tanh(torch.addcmul(x_new, reset, h_new))
    return torch.lerp(new, h, update)


def lstm_step(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next states of an LSTM, the output first."""
    write, keep, new, out = gates.chunk(4, -1)
    remembered = torch.sigmoid(keep) * c
    c = torch.addcmul(remembered, torch.sigmoid(write), torch.tanh(new))
    return torch.sigmoid(out) * torch.tanh(c), c


_Cell = Callable[[Tensor, States, Weights], States]
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.gru: partial(_step, _gru),
    torch.lstm: partial(_step, _lstm),
    one_hot: _one_hot,
}
"""They return None if torch's function is to be called."""


_LOCK = threading.RLock()  # Two threads at once would restore each other's function.


@contextmanager
def without_branches() -> Iterator[None]:
    """Make TorchRL's bounded specs clamp every value in this thread."""
    specs = sys.modules.get("torchrl.data.tensor_specs")
    if specs is None:  # No module of the policy can have a spec.
        yield
        return
    bounded: Any = specs.Bounded
    thread = threading.get_ident()
    with _LOCK:
        original = bounded.project  # Inherited.

        def project(spec: Any, value: Any) -> Any:
            if threading.get_ident() != thread:
                return original(spec, value)
            return spec._project(value)  # noqa: SLF001

        bounded.project = project
        try:
            yield
        finally:
            del bounded.project
