"""Fused policies equal called ones for tensors of every dtype and layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pure_modules import Called, Computes, collected
from torch import Tensor, nn
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector
from marl_collect.policies.fused.program import Program
from marl_collect.policies.fused.record import record

ACTION, HUNTERS, EXTRA = ("prey", "action"), ("hunter", "action"), ("prey", "extra")


def two_workers(*args: Any, **options: Any) -> MultiSyncCollector:
    return MultiSyncCollector(*args, num_workers=2, **options)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether dtypes and values are equal, floats up to their last bits."""
    if one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, equal_nan=True)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "conjugate, changed": lambda x: torch.complex(x, x + 1).conj() * 2,
    "imaginary part of a conjugate": lambda x: torch.complex(x, x + 1).conj().imag,
    "negative view": lambda x: torch._neg_view(x * 1),
    "real view": lambda x: torch.view_as_real(torch.complex(x, x + 1).conj().clone()),
    "expanded": lambda x: (x[:, :1] * 2).expand(-1, 3, -1),
    "a number expanded": lambda x: x.sum().expand(len(x), 3, 1),
    "a constant": lambda x: torch.ones(len(x), 3),
    "transposed": lambda x: (x * 2).transpose(1, 2),
    "every second": lambda x: (x * 2)[..., ::2],
    "flipped": lambda x: x.flip(1),
    "a diagonal": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).diagonal(0, 2, 3),
    "unfolded": lambda x: (x * 2).unfold(2, 2, 1),
    "a chunk": lambda x: (x * 2).chunk(3, -1)[1],
    "without values": lambda x: (x * 2)[..., :0],
    "the input": lambda x: x,
    "a view of the input": lambda x: x[..., 1:],
    "float from bfloat16": lambda x: x.bfloat16().float(),
}


def converted(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype)


def hunters(x: Tensor) -> Tensor:
    return (x[:, :2, 1] % 4).long()


COLLECTED = pytest.mark.parametrize(
    ("kind", "module"),
    [
        (Collector, Computes),
        *(
            pytest.param(two_workers, module, marks=pytest.mark.processes)
            for module in (Computes, Called)
        ),
    ],
)
ACTIONS: list[Callable[[Tensor], Tensor]] = [
    *(
        partial(converted, dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ),
    torch._neg_view,
    lambda x: x[:, :1].expand(-1, 3, -1),
    lambda x: torch.complex(x, x).conj().imag,
]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_may_have_any_dtype_and_layout(action: Any) -> None:
    def act(_: Any, x: Tensor) -> Any:
        return action((x[..., :2] + 1) / 20), hunters(x)

    keys = [ACTION, HUNTERS]
    expected, how = collected(Collector, CountingEnv, Called(act), "prey", keys)
    assert "is called once per frame" in how
    actual, how = collected(Collector, CountingEnv, Computes(act), "prey", keys)
    assert how.startswith("Fused"), how
    for key in keys:
        torch.testing.assert_close(actual[key], expected[key])


@COLLECTED
def test_outputs_may_have_any_dtype_and_layout(kind: Any, module: Any) -> None:
    extras: list[Any] = [partial(converted, dtype) for dtype in DTYPES]
    # The other one depends on all environments of a process.
    alone = kind is Collector
    extras += [LAYOUTS[k] for k in LAYOUTS if alone or k != "a number expanded"]
    keys = [ACTION, HUNTERS, *(("prey", f"extra_{i}") for i in range(len(extras)))]

    def act(_: Any, x: Tensor) -> Any:
        action = ((x[..., :2] + 1) / 20).to(torch.bfloat16)
        return action, hunters(x), *(extra(x) for extra in extras)

    expected, _ = collected(Collector, CountingEnv, Called(act), "prey", keys)
    actual, how = collected(kind, CountingEnv, module(act), "prey", keys)
    assert how.startswith("Fused") == (module is Computes), how
    for key in keys:
        torch.testing.assert_close(actual[key], expected[key], equal_nan=True)


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "bfloat16": (lambda x: x.bfloat16(), "dtype torch.bfloat16.*convert it"),
    "sparse": (lambda x: x.to_sparse(), r"dense tensor, but is torch.sparse_coo.*to_d"),
    "compressed": (lambda x: x.to_sparse_csr(), r"is torch.sparse_csr: convert it"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        r"is quantized: convert it.*\.dequantize\(\)",
    ),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), r"is nested: convert it"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", [Computes, Called])
@pytest.mark.parametrize("name", WRONG)
def test_outputs_that_cannot_be_stored_are_named(name: str, kind: Any) -> None:
    extra, message = WRONG[name]
    module = kind(lambda _, x: ((x[..., :2] + 1) / 20, hunters(x), extra(x)))
    with pytest.raises(TypeError, match=f"output prey/extra .*{message}"):
        collected(Collector, CountingEnv, module, "prey", [ACTION, HUNTERS, EXTRA])


EYE = torch.eye(3) + torch.eye(3).flip(0) * 0.5
NEGATIVE = torch._neg_view(torch.ones(3))
BUFFERS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "coo": (EYE.to_sparse, lambda m, x: torch.stack([m @ row for row in x])),
    "not coalesced": (
        lambda: torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 1], [0, 0, 2]]), torch.tensor([1.0, 2.0, 3.0]), (3, 3)
        ),
        lambda m, x: torch.stack([m @ row for row in x]),
    ),
    "csr": (EYE.to_sparse_csr, lambda m, x: torch.stack([m @ row for row in x])),
    "csc": (EYE.to_sparse_csc, lambda m, x: torch.stack([m @ row for row in x])),
    "bsr": (
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda m, x: x[..., :2] @ m.values()[0],
    ),
    "values of coo": (EYE.to_sparse, lambda m, x: x * m.coalesce().values()[:3]),
    "dense of coo": (EYE.to_sparse, lambda m, x: x @ m.to_dense()),
    "quantized": (
        lambda: torch.quantize_per_tensor(EYE, 0.1, 0, torch.quint8),
        lambda m, x: x @ m.dequantize(),
    ),
    "conjugate": (torch.complex(EYE, EYE).conj, lambda m, x: x @ (m.real - m.imag)),
    "negative view": (lambda: NEGATIVE, lambda m, x: x * m),
    "expanded": (lambda: torch.ones(1).expand(3), lambda m, x: x * m),
    "transposed": (EYE.t, lambda m, x: x @ m),
}
BUFFERS |= {
    str(dtype)[6:]: (
        partial(converted, dtype, torch.tensor([1.0, 0.0, 3.0])),
        lambda m, x: x * m.to(torch.complex64).real,
    )
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, *DTYPES)
}


@COLLECTED
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per_tensor")
def test_buffers_may_have_any_dtype_and_layout(kind: Any, module: Any) -> None:
    extras = [("prey", f"extra_{i}") for i in range(len(BUFFERS))]

    def act(module: Any, x: Tensor) -> Any:
        tables = (module.get_buffer(f"table_{i}") for i in range(len(BUFFERS)))
        made = zip(BUFFERS.values(), tables, strict=True)
        extra = (call(table, x)[..., :2] for (_, call), table in made)
        return (x[..., :2] + 1) / 20, hunters(x), *extra

    def build(module: Any) -> nn.Module:
        built: nn.Module = module(act)
        for i, (buffer, _) in enumerate(BUFFERS.values()):
            built.register_buffer(f"table_{i}", buffer())
        return built

    keys = [ACTION, HUNTERS, *extras]
    expected, _ = collected(Collector, CountingEnv, build(Called), "prey", keys)
    actual, how = collected(kind, CountingEnv, build(module), "prey", keys)
    assert how.startswith("Fused") == (module is Computes), how
    for key in keys:
        torch.testing.assert_close(actual[key], expected[key])
        assert key == HUNTERS or len(expected[key].unique()) > 10


INTEGERS = [
    *(np.uint8, np.int8, np.int16, np.int32, np.int64),
    *(np.uint16, np.uint32, np.uint64),
]
OBSERVED = [np.bool_, *INTEGERS, np.float16, np.float32, np.float64]


def numbers(dtype: Any) -> Any:
    if dtype is np.bool_:
        return np.array([0, 1, 1, 0, 0, 0, 1, 0, 1, 1], np.bool_)
    some = np.array([0, 1, 2, 3, 5, 7, 44, 63, 100, 127])
    if np.dtype(dtype).kind == "f":
        return np.concatenate([some / 7, -some / 3]).astype(dtype)
    limits = np.iinfo(dtype)
    return np.array([*some, limits.max, limits.min, limits.max // 3], dtype)


NUMBERS: tuple[Any, ...] = (-1, 0, 2, 100, 300, 70_000, 2**40, 0.5, True)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = ("add", "sub", "mul", "div", "maximum", "minimum", "remainder", "pow")
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "square": torch.square,
    "sign": torch.sign,
    "relu": torch.relu,
    "logical_not": torch.logical_not,
    "bitwise_not": torch.bitwise_not,
    "invert": lambda x: ~x,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: (x.double() / 1e18).exp(),
    "sum": lambda x: x.sum(-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1, keepdim=True),
    "any": lambda x: x.any(-1),
    "all": lambda x: x.all(-1),
    "argmax": lambda x: x.argmax(-1),
    "mean": lambda x: x.double().mean(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "where": lambda x: torch.where(x > x.flip(-1), x, x.flip(-1)),
    "masked_fill": lambda x: x.masked_fill(x > 2, 1),
    "clamp to numbers": lambda x: x.clamp(1, 100),
    "clamp below": lambda x: x.clamp(min=2),
    "stack": lambda x: torch.stack([x, x.flip(-1)], -1),
    "float": lambda x: x.float() / 255,
    "long": lambda x: x.long(),
    "halves": lambda x: x / 2,
    "subtracted from a number": lambda x: 100 - x,
    "added twice": lambda x: torch.add(x, x, alpha=2),
    "shifted": lambda x: x << 1,
    "an exclusive or": lambda x: x ^ x.flip(-1),
    "compared": lambda x: x > x.flip(-1),
}


WITH_NUMBERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "clamp": lambda number, x: x.clamp(max=number),
    "masked_fill": lambda number, x: x.masked_fill(x > 2, number),
    "where": lambda number, x: torch.where(x > 2, number, x),
    "subtracted from": lambda number, x: number - x,
}


def results(x: Tensor, calls: dict[str, Callable[[Tensor], Tensor]]) -> list[str]:
    """Return the calls that torch supports for these numbers."""
    supported = []
    for name, call in calls.items():
        try:
            call(x)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        supported.append(name)
    return supported


def on_numbers(dtype: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    def call(name: str, number: Any) -> Callable[[Tensor], Tensor]:
        function = getattr(torch, name)
        if name in ("maximum", "minimum"):
            return lambda x: function(x, torch.tensor(number))
        return lambda x: function(x, number)

    # The powers of larger ones are beyond float16.
    limit = 200 if dtype is np.float16 else np.inf
    numbers_beside = [number for number in NUMBERS if number < limit]
    calls = {
        f"{name} {number}": call(name, number)
        for name in (*COMPARISONS, *ARITHMETIC)
        for number in numbers_beside
        if number != 0 or name not in ("div", "remainder")
    }
    for number in numbers_beside:
        calls |= {
            f"{name} {number}": partial(function, number)
            for name, function in WITH_NUMBERS.items()
        }
    return calls


@pytest.mark.parametrize("dtype", OBSERVED, ids=lambda dtype: dtype.__name__)
def test_operations_on_observations_of_any_dtype(dtype: Any) -> None:
    calls = UNARY | on_numbers(dtype)
    some = numbers(dtype)
    x = torch.from_numpy(np.resize(some, (5, 4)))
    names = results(x, calls)
    assert len(names) > 30
    draw = np.random.default_rng(0)

    def draw_moderate_numbers() -> None:
        normal = draw.normal(0, 3, (5, 4))
        whole = draw.integers(0, 2 if dtype is np.bool_ else 100, (5, 4))
        drawn = normal if x.is_floating_point() else whole
        x.copy_(torch.from_numpy(drawn.astype(dtype)))

    different = []
    for name in names:
        result, operations = record(partial(calls[name], x))
        program = Program(operations, [x], [result])
        program.use_numpy(5, draw_moderate_numbers, comparisons=3)
        for frame in range(len(some)):  # The smallest and the largest are among them.
            x.copy_(torch.from_numpy(np.resize(np.roll(some, frame), (5, 4))))
            assert program.prepare()
            assert program.run()
            if not same(result, calls[name](x)):
                different.append((name, frame))
    assert not different
