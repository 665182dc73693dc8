"""Copy parts of small tensors once, so that what computes with them starts sooner.

Operations take twice as long on few numbers that do not lie in memory as their results,
such as the means and the deviations that a network's last layer gives in turn. Several
operations read each of these, and copying them costs less than the first one loses.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from marl_collect.policies.fused.record import TensorOp, storages


def with_dense_operands(
    operations: Sequence[TensorOp], most_numbers: int
) -> list[TensorOp]:
    """Return operations whose elementwise ones read operands that lie as the result.

    Args:
        operations: as recorded.
        most_numbers: in an operand that is worth copying.
    """
    # Memory that no operation writes keeps its values, so its copy stays valid.
    changed = set().union(*(operation.writes() for operation in operations))
    copies: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    result: list[TensorOp] = []

    def alike(value: Any, to: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != to.shape:
            return value
        if _strides(value) == _strides(to) or storages(value) & changed:
            return value
        key = (id(value), to.stride())
        if key not in copies:
            copies[key] = torch.empty_like(to, dtype=value.dtype).copy_(value)
            clone = torch.ops.aten.clone.default
            result.append(TensorOp(clone, (value,), {}, copies[key]))
        return copies[key]

    for operation in operations:
        if _gains(operation) and operation.result.numel() <= most_numbers:
            args = tuple(alike(value, operation.result) for value in operation.args)
            operation = replace(operation, args=args)
        result.append(operation)
    return result


def _gains(operation: TensorOp) -> bool:
    elementwise = torch.Tag.pointwise in operation.function.tags
    softmax = operation.name in ("_softmax", "_log_softmax")
    return (elementwise or softmax) and not operation.writes()


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return those that matter."""
    return [
        stride
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ]
