"""Strided parts of small tensors are copied once; results do not change."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marl_collect.policies.fused.dense import with_dense_operands
from marl_collect.policies.fused.program import Program
from marl_collect.policies.fused.record import record


def halves(x: Tensor) -> Tensor:
    loc, scale = (x * 2).split(2, -1)
    scale = scale.exp()
    return (loc + scale) * loc - scale


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    part = y[:, :2]
    before = part + 1
    y.add_(1)
    return before * part


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "halves": (halves, 2),
    "an input's part": (lambda x: x[:, 1:] + x[:, :-1].log_softmax(-1), 2),
    "changed in place": (in_place, 0),
    "columns beside rows": (lambda x: x[:, :3] * x[:, 1:].t(), 2),
    "dense": (lambda x: x + 1, 0),
    "columns in a row": (lambda x: x.t() + 1, 0),
    "not elementwise": (lambda x: x[:, :2] @ x[:2], 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_parts_are_copied_once_and_results_are_the_same(name: str) -> None:
    call, copies = CALLS[name]
    x = torch.randn(3, 4)
    result, recorded = record(lambda: call(x))
    operations = with_dense_operands(recorded, 12)
    assert len(operations) == len(recorded) + copies
    program = Program(operations, [x], [result])
    for _ in range(3):
        x.normal_()
        assert program.prepare()
        assert program.run()
        torch.testing.assert_close(result, call(x))


def test_large_parts_are_not_copied() -> None:
    x = torch.randn(3, 4)
    _, operations = record(lambda: halves(x))
    assert len(with_dense_operands(operations, 5)) == len(operations)
