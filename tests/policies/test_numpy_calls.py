"""Operations that numpy computes have torch's results, for any number of rows."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from marl_collect.policies.fused.numpy_calls import close, numpy_calls, run_quietly
from marl_collect.policies.fused.record import TensorOp, record, tensors

functional: Any = nn.functional

ROWS = 5
LOW, HIGH = torch.tensor([-1.0, -0.5, 0.0, 0.2]), torch.tensor([0.0, 0.5, 1.0, 0.4])
WEIGHT = torch.linspace(-1, 1, 12).reshape(4, 3)
WEIGHTS = torch.linspace(-1, 1, ROWS * 12).reshape(ROWS, 4, 3)
BIAS = torch.tensor([0.5, -1.0, 2.0])
OTHER = torch.linspace(-2, 2, ROWS * 4).reshape(ROWS, 4)
DOUBLE = OTHER.double()

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs()),
    "log1p": lambda x: torch.log1p(x.abs()),
    "sin": torch.sin,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "add a number": lambda x: x + 0.3,
    "add with alpha": lambda x: torch.add(x, OTHER, alpha=2),
    "subtract from a number": lambda x: 1.5 - x,
    "multiply by a row": lambda x: x * LOW,
    "divide": lambda x: x / OTHER,
    "strided": lambda x: (x[:, :2] * x[:, 2:]).neg(),
    "transposed": lambda x: (x.t().exp() - 0.5).clamp(-0.1, 0.1),
    "transposed in part": lambda x: torch.addcmul(BIAS[:1], x.t(), OTHER.t(), value=2),
    "clamp to numbers": lambda x: x.clamp(-0.5, 0.5),
    "clamp to tensors": lambda x: torch.clamp(x, LOW, HIGH),
    "clamp below": lambda x: x.clamp(min=0.1),
    "clamp_min": lambda x: torch.clamp_min(x, 0.1),
    "clamp_max": lambda x: torch.clamp_max(x, LOW),
    "square": lambda x: x**2,
    "masked_fill": lambda x: x.masked_fill(OTHER > 0, 3),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "logsumexp of masked rows": lambda x: torch.where(
        LOW >= 0, x, -torch.inf
    ).logsumexp(-1, keepdim=True),
    "addcmul": lambda x: torch.addcmul(x, OTHER, LOW, value=-0.5),
    "addcmul of rows": lambda x: torch.addcmul(x, LOW, HIGH),
    "compare": lambda x: x > 0.1,
    "where": lambda x: torch.where(x > 0, x, OTHER),
    "sum": lambda x: x.sum(-1),
    "sum of columns": lambda x: x.sum(0, keepdim=True),
    "sum of two": lambda x: x.reshape(ROWS, 2, 2).sum((-1, -2)),
    "sum of all": lambda x: x.sum(),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "any": lambda x: (x > 0).any(-1),
    "all of all": lambda x: (x > -9).all(),
    "argmax": lambda x: x.argmax(-1),
    "cat": lambda x: torch.cat([x, OTHER[:, :1], x], -1),
    "stack": lambda x: torch.stack([x, OTHER], 1),
    "clone": lambda x: x.clone(),
    "to float64": lambda x: x.to(torch.float64),
    "linear": lambda x: functional.linear(x, WEIGHT.t(), BIAS),
    "product": lambda x: x @ WEIGHT,
    "batched product": lambda x: x[:, None] @ WEIGHTS,
    "batched affine": lambda x: torch.baddbmm(BIAS, x[:, None], WEIGHTS),
}

OF_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "no such operation": functional.silu,
    "divided and rounded": lambda x: torch.div(x, OTHER, rounding_mode="floor"),
    "mixed dtypes": lambda x: x * OTHER.to(torch.float64),
    # As float32, 0.1 is not below 0.1.
    "compared with another dtype": lambda x: x > DOUBLE,
    "sum of flags": lambda x: (x > 0).sum(-1),
    "sum in another dtype": lambda x: x.sum(-1, dtype=torch.float64),
    "argmax of all": lambda x: x.argmax(),
    # numpy has no cheap equivalent of its index check.
    "gather": lambda x: x.gather(-1, torch.tensor([[3], [0], [1], [2], [3]])),
    "gather of columns": lambda x: x.gather(0, torch.zeros(1, 4, dtype=torch.int64)),
    "not of numpy": lambda x: x.to(torch.bfloat16).clone(),
    "to integers": lambda x: x.to(torch.int64),
    "softplus of another slope": lambda x: functional.softplus(x, beta=2.0),
}


def operations(call: Callable[[Tensor], Tensor], x: Tensor) -> list[TensorOp]:
    with torch.no_grad():
        return record(lambda: call(x))[1]


def is_constant(x: Tensor) -> Callable[[Tensor], bool]:
    inner = {id(x) for x in (OTHER, DOUBLE, LOW, HIGH, WEIGHT, WEIGHTS, BIAS)}
    return lambda tensor: tensor is not x and id(tensor) in inner


def example(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_torch(name: str) -> None:
    x = example()
    recorded = operations(CALLS[name], x)
    actual = [
        numpy_calls(recorded_operation, ROWS, is_constant(x))
        for recorded_operation in recorded
    ]
    assert any(actual), [recorded_operation.name for recorded_operation in recorded]
    x.copy_(example().flip(0))
    for operation, calls in zip(recorded, actual, strict=True):
        if calls is None:
            continue
        with torch.no_grad():
            repeated = operation.function(*operation.args, **operation.kwargs)
        (result,), (expected,) = tensors(operation.result), tensors(repeated)
        for call in itertools.chain.from_iterable(calls):
            call()
        assert close(result, expected), operation.name
        assert result.dtype == expected.dtype
        result.copy_(expected)


@pytest.mark.parametrize("name", OF_TORCH)
def test_what_numpy_computes_differently_is_left_to_torch(name: str) -> None:
    x = example()
    last = operations(OF_TORCH[name], x)[-1]
    assert numpy_calls(last, ROWS, is_constant(x)) is None


def test_setup_reads_constants_again() -> None:
    weight, x = WEIGHT.clone(), example()
    (operation,) = operations(lambda x: torch.mm(x, weight), x)
    calls = numpy_calls(operation, ROWS, lambda tensor: tensor is weight)
    assert calls is not None
    weight.mul_(2)
    for call in itertools.chain.from_iterable(calls):
        call()
    assert close(operation.result, x @ weight)


def test_large_products_are_left_to_torch() -> None:
    x, weight = torch.ones(10, 200), torch.ones(200, 101)
    (operation,) = operations(lambda x: x @ weight, x)
    assert numpy_calls(operation, 10, is_constant(x)) is None


@pytest.mark.parametrize("function", ["tanh", "exp", "log1p", "softplus", "sum"])
def test_a_row_s_result_does_not_depend_on_other_rows(function: str) -> None:
    def one(rows: int) -> Tensor:
        x = example(64)[:rows]
        operation = operations(CALLS[function], x)[-1]
        calls = numpy_calls(operation, rows, is_constant(x))
        assert calls is not None
        for call in calls[1]:
            call()
        result: Tensor = operation.result
        return result

    reference = one(64)
    for rows in (1, 2, 3, 7, 33):
        assert torch.equal(one(rows), reference[:rows]), rows


def test_infinities_cause_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_quietly(lambda: np.log(np.zeros(2)))[0] == -np.inf
        with pytest.raises(RuntimeWarning):
            np.log(np.zeros(2))
