"""Rewritten operations are fewer or faster, and their results do not change."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marl_collect.policies.fused.program import Program
from marl_collect.policies.fused.record import record
from marl_collect.policies.fused.rewrite import with_dense_operands, with_log_softmax


def halves(x: Tensor) -> Tensor:
    loc, scale = (x * 2).split(2, -1)
    scale = scale.exp()
    return (loc + scale) * loc - scale


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    view = y[:, :2]
    before = view + 1
    y.add_(1)
    return before * view


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


def normalised(x: Tensor) -> Tensor:
    logits = x - x.logsumexp(-1, keepdim=True)
    return logits.softmax(-1) * 2 + logits


def summed_twice(x: Tensor) -> Tensor:
    total = x.logsumexp(0, keepdim=True)
    return (x - total) * total


def written_between(x: Tensor) -> Tensor:
    y = x * 2
    total = y.logsumexp(-1, keepdim=True)
    y.add_(1)
    return y - total


def written_after(x: Tensor) -> Tensor:
    logits = x.log_softmax(-1)
    return logits.add_(1).softmax(-1)


SOFTMAXES: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "of a distribution": (
        normalised,
        ["logsumexp", "_log_softmax", "exp", "mul", "add"],
    ),
    "of transposed logits": (
        lambda x: normalised(x.t()),
        ["t", "logsumexp", "_log_softmax", "clone", "exp", "mul", "add"],
    ),
    "sum used twice": (summed_twice, ["logsumexp", "_log_softmax", "mul"]),
    "written between": (written_between, ["mul", "logsumexp", "add_", "sub"]),
    "written after": (written_after, ["_log_softmax", "add_", "_softmax"]),
    "another dimension": (
        lambda x: x.log_softmax(0).softmax(1),
        ["_log_softmax", "_softmax"],
    ),
    "of another tensor": (
        lambda x: x - (x * 2).logsumexp(-1, keepdim=True),
        ["mul", "logsumexp", "sub"],
    ),
    "of two dimensions": (
        lambda x: x - x.logsumexp((0, 1), keepdim=True),
        ["logsumexp", "sub"],
    ),
    "of a square": (lambda x: x - x.logsumexp(-1), ["logsumexp", "sub"]),
    "scaled": (
        lambda x: x.sub(x.logsumexp(-1, keepdim=True), alpha=2),
        ["logsumexp", "sub"],
    ),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_normalised_logarithms_are_computed_at_once(name: str) -> None:
    call, names = SOFTMAXES[name]
    x = torch.randn(3, 3)
    result, recorded = record(lambda: call(x))
    rewritten = with_log_softmax(recorded)
    assert [operation.name for operation in rewritten] == names
    program = Program(rewritten, [x], [result])
    unused = {"of a distribution": 1, "of transposed logits": 2}  # And the view.
    assert program.size == len(names) - unused.get(name, 0)
    for values in (torch.randn(3, 3), torch.randn(3, 3) * 1e4):
        values[0, 0] = -torch.inf
        x.copy_(values)
        assert program.run()
        torch.testing.assert_close(result, call(x), equal_nan=True)
