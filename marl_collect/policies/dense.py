"""Copy parts of small tensors once, so that what computes with them starts sooner.

Operations take twice as long on few numbers that do not lie side by side in memory,
such as the means and the deviations that a network's last layer gives in turn. Several
operations read each of these, and copying them costs less than the first one loses.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from marl_collect.policies.recording import Operation, storages


def with_dense_operands(
    operations: Sequence[Operation], most_numbers: int
) -> list[Operation]:
    """Return operations whose elementwise ones read copies of strided tensors.

    Args:
        operations: as recorded.
        most_numbers: in a tensor that is worth copying.
    """
    # Other memory stands as it is from where it is first read, and so does its copy.
    changed = set().union(*(operation.writes() for operation in operations))
    copies: dict[int, Any] = {}
    result: list[Operation] = []

    def dense(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() > most_numbers:
            return value
        if id(value) not in copies:
            copy = value.detach().clone()
            if copy.stride() == value.stride() or storages(value) & changed:
                return value
            copies[id(value)] = copy
            clone = torch.ops.aten.clone.default
            result.append(Operation(clone, (value,), {}, copy))
        return copies[id(value)]

    for operation in operations:
        gains = torch.Tag.pointwise in operation.function.tags
        gains |= operation.name in ("_softmax", "_log_softmax")
        if gains and not operation.writes():
            operation = replace(operation, args=tuple(map(dense, operation.args)))
        result.append(operation)
    return result
