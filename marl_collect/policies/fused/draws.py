"""Draws from torch's generator with less overhead than the operations of torch.

``multinomial`` and ``normal`` spend most of their time on checks of their arguments.
The calls here draw the same numbers, bit for bit, into given memory. They check the
same conditions on the results, and leave errors to torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from marl_collect.policies.fused.numpy_arguments import UnsuitableError, array
from marl_collect.policies.fused.record import TensorOp

Draw = Callable[[], Any]


def drawing(operation: TensorOp, out: torch.Tensor) -> Draw | None:
    """Return a call that writes the result of a random operation to ``out``.

    Returns:
        None if there is none that is faster than torch. The caller must verify that it
        draws the same numbers.
    """
    builder = _BUILDERS.get(operation.function._overloadname, {}).get(operation.name)  # noqa: SLF001
    if builder is None or operation.kwargs:
        return None
    try:
        return builder(operation, out, partial(operation.function, *operation.args))
    except UnsuitableError:
        return None


def _multinomial(operation: TensorOp, out: torch.Tensor, torchs: Draw) -> Draw | None:
    """Draw an index per row: the largest ratio of probability to exponential noise."""
    probabilities, count = operation.args[:2]
    if count != 1 or probabilities.ndim != 2 or not probabilities.numel():
        return None
    noise = torch.empty_like(probabilities)
    given, ratio, index = array(probabilities), array(noise), array(out)[:, 0]
    best = np.empty(len(given), given.dtype)
    smallest: Any = np.minimum.reduce
    largest: Any = np.maximum.reduce

    def draw() -> None:
        noise.exponential_()
        np.divide(given, ratio, ratio)
        ratio.argmax(-1, index)
        largest(ratio, -1, None, best)
        valid = smallest(ratio, None) >= 0 and smallest(best) > 0
        if not (valid and largest(best) < np.inf):
            out.copy_(torchs())  # Raises an error.

    return draw


def _normal(operation: TensorOp, out: torch.Tensor, torchs: Draw) -> Draw:
    mean, deviation, drawn = map(array, (*operation.args[:2], out))
    smallest: Any = np.minimum.reduce

    def draw() -> None:
        if not smallest(deviation, None) >= 0:
            out.copy_(torchs())  # Raises an error.
            return
        out.normal_()
        np.multiply(drawn, deviation, drawn)
        np.add(drawn, mean, drawn)

    return draw


_BUILDERS: dict[str, dict[str, Callable[[TensorOp, torch.Tensor, Draw], Any]]] = {
    "default": {"multinomial": _multinomial},
    "Tensor_Tensor": {"normal": _normal},
}
"""Builders by overload and operator."""
