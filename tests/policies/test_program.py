"""Recorded, rewritten and elementary operations compute what torch's calls compute."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from marl_collect.policies.fused.draws import drawing
from marl_collect.policies.fused.elementary import ElementaryOperations
from marl_collect.policies.fused.numpy_calls import run_quietly
from marl_collect.policies.fused.program import Program
from marl_collect.policies.fused.record import (
    NotRepeatableError,
    OperationObserver,
    TensorOp,
    record,
)
from marl_collect.policies.fused.rewrite import with_dense_operands, with_log_softmax

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
    "filled, then changed": lambda x: torch.zeros(3, 4).add_(x),
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
        assert all(program.run() for _ in range(2))
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_number_that_16_bits_cannot_hold_is_not_rounded(dtype: torch.dtype) -> None:
    x = torch.zeros(64, dtype=dtype)
    result, operations = record(lambda: x * 0.1)
    program = Program(operations, [x], [result])
    x.copy_(torch.randn(64))
    assert program.run()
    assert torch.equal(result, x * 0.1)


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
def test_calls_without_repetition_are_refused(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3)
    with pytest.raises(NotRepeatableError):
        record(lambda: call(x))


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


REWRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "halves": (halves, 2),
    "an input's part": (lambda x: x[:, 1:] + x[:, :-1].log_softmax(-1), 2),
    "changed in place": (in_place, 0),
    "columns beside rows": (lambda x: x[:, :3] * x[:, 1:].t(), 2),
    "dense": (lambda x: x + 1, 0),
    "columns in a row": (lambda x: x.t() + 1, 0),
    "not elementwise": (lambda x: x[:, :2] @ x[:2], 0),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_parts_are_copied_once_and_results_are_the_same(name: str) -> None:
    call, copies = REWRITTEN[name]
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


LEFT = ["logsumexp", "sub"]
SOFTMAXES: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "distribution": (normalised, ["logsumexp", "_log_softmax", "exp", "mul", "add"]),
    "of transposed logits": (
        lambda x: normalised(x.t()),
        ["t", "logsumexp", "_log_softmax", "clone", "exp", "mul", "add"],
    ),
    "sum used twice": (summed_twice, ["logsumexp", "_log_softmax", "mul"]),
    "written between": (written_between, ["mul", "logsumexp", "add_", "sub"]),
    "written after": (written_after, ["_log_softmax", "add_", "_softmax"]),
    "dimension": (lambda x: x.log_softmax(0).softmax(1), ["_log_softmax", "_softmax"]),
    "of another tensor": (
        lambda x: x - (x * 2).logsumexp(-1, keepdim=True),
        ["mul", "logsumexp", "sub"],
    ),
    "of two dimensions": (lambda x: x - x.logsumexp((0, 1), keepdim=True), LEFT),
    "of a square": (lambda x: x - x.logsumexp(-1), LEFT),
    "scaled": (lambda x: x.sub(x.logsumexp(-1, keepdim=True), alpha=2), LEFT),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_normalised_logarithms_are_computed_at_once(name: str) -> None:
    call, names = SOFTMAXES[name]
    x = torch.randn(3, 3)
    result, recorded = record(lambda: call(x))
    rewritten = with_log_softmax(recorded)
    assert [operation.name for operation in rewritten] == names
    program = Program(rewritten, [x], [result])
    unused = {"distribution": 1, "of transposed logits": 2}  # And the view.
    assert program.size == len(names) - unused.get(name, 0)
    for values in (torch.randn(3, 3), torch.randn(3, 3) * 1e4):
        values[0, 0] = -torch.inf
        x.copy_(values)
        assert program.run()
        torch.testing.assert_close(result, call(x), equal_nan=True)


KINDS: Any = pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
TORCHS = {"mkldnn_rnn_layer", "unsafe_split", "unsafe_chunk", "sigmoid_"}
"""What torch's functions run, and elementary operations do not."""


def states(net: Any, rows: int) -> Any:
    layers = net.num_layers * (2 if net.bidirectional else 1)
    h = torch.randn(layers, rows, net.proj_size or net.hidden_size)
    c = torch.randn(layers, rows, net.hidden_size)
    return h if isinstance(net, nn.GRU) else (h, c)


def flat(result: Any) -> list[torch.Tensor]:
    out, after = result
    out = out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out
    return [out, *(after if isinstance(after, tuple) else (after,))]


class Names(OperationObserver):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def ran(self, operation: TensorOp) -> None:
        self.names.add(operation.name)


def check(net: Any, x: Any, *arguments: Any, replaced: bool) -> None:
    """Compare the results, and check that the operations are or are not torch's."""
    with torch.no_grad():
        torch.manual_seed(1)
        expected = flat(net(x, *arguments))
        torch.manual_seed(1)
        with ElementaryOperations(), Names() as observer:
            result = net(x, *arguments)
    for ours, theirs in zip(flat(result), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert replaced != bool(observer.names & TORCHS), observer.names


@KINDS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_is_elementary(kind: Any, bias: bool, layers: int, rows: int) -> None:
    torch.manual_seed(0)
    for batch_first, with_state in itertools.product((True, False), repeat=2):
        net = kind(6, 16, layers, bias=bias, batch_first=batch_first)
        x = torch.randn(rows, 1, 6) if batch_first else torch.randn(1, rows, 6)
        check(net, x, *([states(net, rows)] if with_state else []), replaced=True)


PACKED = pack_sequence([torch.zeros(1, 3), torch.ones(1, 3)])
OTHER_CALLS: list[tuple[dict[str, Any], Any]] = [
    ({"batch_first": True}, torch.ones(2, 2, 3)),  # Two steps.
    ({"batch_first": True, "bidirectional": True}, torch.ones(2, 1, 3)),
    ({"batch_first": True, "dropout": 0.5, "num_layers": 2}, torch.ones(2, 1, 3)),
    ({}, PACKED),
]


@pytest.mark.parametrize(
    ("kind", "options", "x"),
    [
        *((kind, *call) for kind in (nn.GRU, nn.LSTM) for call in OTHER_CALLS),
        (nn.LSTM, {"batch_first": True, "proj_size": 2}, torch.ones(2, 1, 3)),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
def test_other_calls_are_torchs(kind: Any, options: dict[str, Any], x: Any) -> None:
    torch.manual_seed(0)
    net = kind(3, 4, **options)
    check(net, x, states(net, 2), replaced=False)


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
