"""Repeated operations compute the results of the recorded call on other inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marl_collect.policies.fused.program import Program
from marl_collect.policies.fused.record import NotRepeatableError, record

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: x.t()[1:].reshape(-1).unsqueeze(0) + 1,
    "numbers": lambda x: (2 - x) * 3 + x / 7 - 1.5,
    "in place": lambda x: (x * 1).add_(2).mul_(x).clamp_(min=0),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "several results": lambda x: x.max(-1).values + x.sort(-1).values.sum(-1),
    "constants": lambda x: x + torch.arange(4) * torch.full((3, 4), 2.0),
    "filled piece by piece": lambda x: torch.zeros(5, 4).index_copy_(
        0, torch.tensor([0, 2, 4]), x
    ),
    "stack": lambda x: torch.stack([x, x * 2], 1).flatten(0, 1).flip(0),
    "types": lambda x: (x > 0).long().sum(-1, keepdim=True).double() * 0.5,
    "softmax": lambda x: x.log_softmax(-1).exp() + x.softmax(0),
    "norm": lambda x: torch.nn.functional.layer_norm(x, [4]),
    "gather": lambda x: x.gather(-1, x.argmax(-1, keepdim=True)),
    "where": lambda x: torch.where(x > 0, x, x.square()).masked_fill(x < -1, -9.0),
    "nothing to do": lambda x: x[:, :2],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_program_computes_the_results_of_the_call(name: str) -> None:
    call = CALLS[name]
    x = torch.randn(3, 4)
    result, operations = record(lambda: call(x))
    program = Program(operations, [x], [result])
    for _ in range(3):
        x.normal_()
        assert program.prepare()
        assert program.run()
        assert torch.equal(result, call(x))


def test_unneeded_operations_are_not_run() -> None:
    x = torch.randn(3)

    def call() -> Tensor:
        x.exp().log().sin()
        return x + 1

    result, operations = record(call)
    assert Program(operations, [x], [result]).size == 1


def test_operations_on_weights_alone_run_once_per_slot() -> None:
    x, weight = torch.randn(3), torch.randn(3)
    result, operations = record(lambda: x * weight.exp().log1p())
    program = Program(operations, [x], [result])
    assert program.size == 1
    weight.fill_(1.0)
    program.prepare()
    program.run()
    assert torch.equal(result, x * weight.exp().log1p())


def test_memory_that_is_filled_and_then_changed_is_filled_again() -> None:
    x = torch.ones(3)

    def call() -> Tensor:
        total = torch.zeros(3)
        total += x
        return total

    result, operations = record(call)
    program = Program(operations, [x], [result])
    for _ in range(3):
        program.prepare()
        program.run()
        program.run()
        assert torch.equal(result, x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_a_guard_reads_numbers_of_any_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    result, operations = record(lambda: x + int(x[1].item()))
    program = Program(operations, [x], [result])
    assert program.run()
    x[0] = 0
    assert program.run()
    x[1] = 0
    assert not program.run()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.add_(1),
        lambda x: x[0].fill_(2),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
    ],
    ids=["in place", "through a view", "out", "mask", "nonzero"],
)
def test_calls_that_cannot_be_repeated_are_refused(
    call: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(3)
    with pytest.raises(NotRepeatableError):
        record(lambda: call(x))
