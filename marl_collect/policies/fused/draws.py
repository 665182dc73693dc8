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

from marl_collect.policies.fused.numpy_calls import UnsuitableError, array
from marl_collect.policies.fused.record import TensorOp

Draw = Callable[[], Any]
Builder = Callable[[TensorOp, torch.Tensor, Draw], Draw | None]


def drawing(operation: TensorOp, out: torch.Tensor) -> Draw | None:
    """Return a call that writes the result of a random operation to ``out``.

    Returns:
        None if there is none that is faster than torch. The caller must verify that it
        draws the same numbers.
    """
    builder = _BUILDERS.get(operation.function._overloadname, {}).get(operation.name)  # noqa: SLF001
    if builder is None or any(operation.kwargs.values()):
        return None
    try:
        return builder(operation, out, partial(operation.function, *operation.args))
    except UnsuitableError:
        return None


def _filled(method: str) -> Builder:
    """Return a builder of draws that fill the result in place, as ``*_like`` do."""

    def build(operation: TensorOp, out: torch.Tensor, torchs: Draw) -> Draw:
        del operation, torchs
        return getattr(out, method)

    return build


def _multinomial(operation: TensorOp, out: torch.Tensor, torchs: Draw) -> Draw | None:
    """Draw an index per row: the largest ratio of probability to exponential noise."""
    probabilities, count = operation.args[:2]
    if count != 1 or probabilities.ndim != 2 or not probabilities.numel():
        return None
    noise = torch.empty_like(probabilities)
    weights, ratio, index = array(probabilities), array(noise), array(out)[:, 0]
    # Reductions take three times as long as products with vectors. The root of a
    # negative number is NaN. A row's sum and its reciprocal are both finite if it is
    # finite and not zero; the reciprocal of a root does not overflow.
    roots, sums = np.empty_like(ratio), np.empty(len(weights), weights.dtype)
    reciprocals, zeros = np.empty_like(sums), np.zeros_like(sums)
    ones = np.ones(weights.shape[1], weights.dtype)

    def draw() -> None:
        noise.exponential_()
        np.divide(weights, ratio, ratio)
        ratio.argmax(-1, index)
        np.sqrt(weights, roots)
        roots.dot(ones, sums)
        np.reciprocal(sums, reciprocals)
        np.add(sums, reciprocals, sums)
        if sums.dot(zeros) != 0:
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


_BUILDERS: dict[str, dict[str, Builder]] = {
    "default": {
        "multinomial": _multinomial,
        "randn_like": _filled("normal_"),
        "rand_like": _filled("uniform_"),
    },
    "Tensor_Tensor": {"normal": _normal},
}
"""Builders by overload and operator."""
