"""Draws with less overhead give torch's numbers, and leave its errors to torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marl_collect.policies.fused.draws import drawing
from marl_collect.policies.fused.numpy_calls import run_quietly
from marl_collect.policies.fused.program import Program
from marl_collect.policies.fused.record import record

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "multinomial": lambda x: torch.multinomial(x, 1, replacement=True),
    "multinomial without replacement": lambda x: torch.multinomial(x, 1),
    "normal": lambda x: torch.normal(x, x + 1),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal of a row": lambda x: torch.normal(x[:1], x),
}


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("name", DRAWS)
def test_the_same_numbers_are_drawn(name: str, rows: int) -> None:
    values = torch.rand(rows, 5)
    out, operations = record(lambda: DRAWS[name](values))
    (operation,) = (op for op in operations if op.random)
    assert drawing(operation, out) is not None
    program = Program(operations, [values], [out])
    for seed in range(20):
        torch.manual_seed(seed)
        values.copy_(torch.rand(rows, 5))
        before = torch.get_rng_state()
        expected = DRAWS[name](values)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        assert program.run()
        assert torch.equal(out, expected)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize(
    ("name", "row", "error"),
    [
        ("multinomial", [float("nan"), 1.0, 1.0], "either `inf`, `nan` or element < 0"),
        ("multinomial", [float("inf"), 1.0, 1.0], "either `inf`, `nan` or element < 0"),
        ("multinomial", [-1.0, 1.0, 1.0], "either `inf`, `nan` or element < 0"),
        ("multinomial", [0.0, 0.0, 0.0], "sum of probabilities <= 0"),
        ("normal", [-2.0, 1.0, 1.0], "std >= 0.0"),
    ],
)
def test_torch_raises_its_errors(name: str, row: list[float], error: str) -> None:
    values = torch.rand(2, 3)
    out, operations = record(lambda: DRAWS[name](values))
    program = Program(operations, [values], [out])
    values[1] = torch.tensor(row)
    with pytest.raises(RuntimeError, match=error):
        program.run()


def test_several_indices_per_row_are_left_to_torch() -> None:
    values = torch.rand(2, 3)
    out, (operation,) = record(lambda: torch.multinomial(values, 2))
    assert run_quietly(drawing, operation, out) is None
