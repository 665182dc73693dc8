"""Computes small torch operations with numpy, which has less overhead per call.

A torch call takes microseconds before it computes anything, which dominates for the
small arrays of a frame. numpy needs a fraction of that. Its results differ from torch's
in the last bits at most; callers verify this with ``close``. Large matrix products stay
with torch. The choice depends only on shapes, so every process makes the same one.
"""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import bytes_of
from marl_collect.policies.fused.record import COPIES, TensorOp, tensors

Array = NDArray[Any]
Call = Callable[[], Any]
IsConstant = Callable[[torch.Tensor], bool]


class UnsuitableError(Exception):
    """An argument that numpy does not support, or treats in another way."""


def _require(suits: object) -> None:
    """Leave an operation to torch if numpy does not suit it."""
    if not suits:
        raise UnsuitableError


@final
class Arguments:
    """The arguments of one operation by name; tensors are arrays on the same memory.

    Attributes:
        first: the first argument.
        setup: calls that update copies of constants, once per slot.
    """

    def __init__(self, operation: TensorOp, constant: IsConstant) -> None:
        schema = operation.function._schema.arguments  # noqa: SLF001
        self._values = {
            argument.name: argument.default_value
            for argument in schema
            if argument.has_default_value()
        }
        names = [argument.name for argument in schema]
        self._values |= dict(zip(names, operation.args, strict=False))
        self._values |= operation.kwargs
        self._constant = constant
        self._first = operation.args[0]
        self.setup: list[Call] = []

    @property
    def first(self) -> Array:
        """Return the first argument."""
        return array(self._first)

    def value(self, name: str) -> Any:
        """Return an argument without conversion."""
        return self._values.get(name)

    def operand(self, name: str, like: Array | None = None) -> Array:
        """Return an argument as an array of the first argument's dtype.

        Python numbers are converted; tensors must have the dtype. A constant tensor is
        copied, contiguous or with the layout of ``like``, because numpy takes several
        times as long if it has to broadcast or to stride.
        """
        value = self._values[name]
        dtype = self.first.dtype
        if not isinstance(value, torch.Tensor):
            return _number(value, dtype)
        operand = array(value)
        _require(operand.dtype == dtype)
        if not self._constant(value):
            return operand
        shape = operand.shape
        copy = np.empty(shape, dtype) if like is None else np.empty_like(like, dtype)
        self.setup.append(partial(np.copyto, copy, operand))
        return copy


def copying(target: Array, source: Array) -> Call:
    """Return a call that copies; copying bytes, if possible, is three times as fast."""
    dense = target.flags.c_contiguous and source.flags.c_contiguous
    alike = target.dtype == source.dtype and target.shape == source.shape
    if dense and alike and target.size:
        return partial(bytes_of(target).__setitem__, slice(None), bytes_of(source))
    # This takes two thirds of the time of np.copyto.
    return partial(target.__setitem__, ..., source)


def _number(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return a number as an array of a dtype that can hold it.

    Raises:
        UnsuitableError: if the dtype cannot hold it: 0.5 or 300 for uint8, 2 for bool.
            Torch computes with the number itself if a tensor has 16 bits, so 0.1 is
            unsuitable for float16.
    """
    may_be_rounded = dtype.kind in "fc" and dtype != np.float16
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value, dtype=dtype)
            fits = may_be_rounded or array == value
    except OverflowError as error:
        raise UnsuitableError from error
    _require(fits)
    return array


def array(tensor: torch.Tensor) -> Array:
    """Return the memory of a tensor as an array.

    Raises:
        UnsuitableError: if numpy does not support the tensor.
    """
    _require(tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg()))
    try:
        memory: Array = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise UnsuitableError from error
    return memory


Builder = Callable[[Arguments, Array], list[Call]]
"""Raises an error if numpy lacks the operation with these arguments."""

RTOL, ATOL = 1e-5, 1e-6
"""Tolerances between results of numpy or a recording and torch's, for equal arguments.

A recording runs the same kernels on the same numbers, so its results usually do not
differ. But a library may choose another kernel for memory with another alignment.
"""

_BY_NUMBER_LIMIT = 64
"""Maximum size per environment for functions that numpy does not vectorise.

The limit is per environment, so that the results of an environment do not depend on how
many others are computed with it.
"""

_PRODUCTS = 200_000
"""Maximum products in a matrix multiplication, for which OpenBLAS starts no threads."""

_ELEMENTWISE: dict[str, np.ufunc] = {
    name: getattr(np, name)
    for name in (
        *("tanh", "exp", "log", "sqrt", "log1p", "expm1", "sin", "cos", "square"),
        *("reciprocal", "maximum", "minimum", "logical_not", "logical_and"),
        *("logical_or", "bitwise_and", "bitwise_or"),
    )
} | {
    "neg": np.negative,
    "abs": np.absolute,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "bitwise_not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_SIGMOID_LIMIT = 256
"""Maximum size per environment for a sigmoid of four calls of numpy.

Among the work of a frame, whose caches it does not share, torch's call takes three
times as long as these four.
"""
_LIMITS = {
    **dict.fromkeys(("log1p", "expm1", "sin", "cos", "softplus"), _BY_NUMBER_LIMIT),
    "sigmoid": _SIGMOID_LIMIT,
}
_REDUCTIONS = {
    "sum": np.add,
    "amax": np.maximum,
    "amin": np.minimum,
    "any": np.logical_or,
    "all": np.logical_and,
}


NumpyCalls = tuple[list[Call], list[Call]]
"""Calls for once per slot, when weights may have changed, and calls for every frame."""


def numpy_calls(
    operation: TensorOp, n_envs: int, constant: IsConstant
) -> NumpyCalls | None:
    """Return calls that compute an operation's result again, in its memory.

    Args:
        operation: as recorded, not random.
        n_envs: number of environments that act at once.
        constant: returns whether a tensor is constant during a slot.

    Returns:
        None if numpy lacks the operation, or torch is as fast.
    """
    builder = _BUILDERS.get(operation.name)
    results = list(tensors(operation.result))
    if builder is None or len(results) != 1 or not results[0].numel():
        return None
    limit = _LIMITS.get(operation.name)
    if limit is not None and results[0].numel() > limit * n_envs:
        return None
    arguments = Arguments(operation, constant)
    try:
        calls = builder(arguments, array(results[0]))
    except (UnsuitableError, AttributeError, LookupError, TypeError, ValueError):
        return None
    return (arguments.setup, calls) if calls else None


_quiet = copy_context()
_quiet.run(np.seterr, all="ignore")


run_quietly = _quiet.run
"""Calls a function without numpy's floating-point warnings, as torch has none."""


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a result equals torch's within the tolerances; NaN equals NaN."""
    if result.shape != expected.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(result, expected)
    near = torch.isclose(result, expected, rtol=RTOL, atol=ATOL, equal_nan=True)
    return bool(near.all())


def _ufunc(function: np.ufunc, *inputs: Array, out: Array) -> Call:
    """Return a call without keywords, which would take a third of its time."""
    arrays = [*inputs, out]
    alike = {array.ndim for array in inputs} <= {0, out.ndim}
    if alike and not out.flags.c_contiguous:
        # Sort the axes by memory order, which numpy would otherwise do in every call.
        # An array that is read and written needs one view: numpy compares identities.
        axes = sorted(range(out.ndim), key=lambda axis: -out.strides[axis])
        views = {id(a): a.transpose(axes) if a.ndim else a for a in arrays}
        arrays = [views[id(array)] for array in arrays]
    if function in (np.maximum, np.minimum):  # These two need `out` as a keyword.
        first, second, result = arrays
        return lambda: function(first, second, out=result)
    return partial(function, *arrays)


def _elementwise(function: np.ufunc) -> Builder:
    def build(arguments: Arguments, out: Array) -> list[Call]:
        first = arguments.operand("self", out)
        _require(out.dtype in (first.dtype, np.dtype(np.bool_)))
        _require(arguments.value("rounding_mode") is None)
        if function.nin == 1:
            return [_ufunc(function, first, out=out)]
        other = arguments.operand("other", out)
        alpha = arguments.value("alpha")
        if alpha in (None, 1):
            return [_ufunc(function, first, other, out=out)]
        factor, scaled = np.asarray(alpha, first.dtype), np.empty_like(other)
        return [
            _ufunc(np.multiply, other, factor, out=scaled),
            _ufunc(function, first, scaled, out=out),
        ]

    return build


def _rsub(arguments: Arguments, out: Array) -> list[Call]:
    _require(arguments.value("alpha") == 1 and out.dtype == arguments.first.dtype)
    first = arguments.operand("self", out)
    return [_ufunc(np.subtract, arguments.operand("other", out), first, out=out)]


def _relu(arguments: Arguments, out: Array) -> list[Call]:
    zero = np.zeros((), dtype=out.dtype)
    return [_ufunc(np.maximum, arguments.first, zero, out=out)]


def _sigmoid(arguments: Arguments, out: Array) -> list[Call]:
    _require(out.dtype == arguments.first.dtype)
    one = np.ones((), out.dtype)
    return [
        _ufunc(np.negative, arguments.first, out=out),
        _ufunc(np.exp, out, out=out),
        _ufunc(np.add, out, one, out=out),
        _ufunc(np.reciprocal, out, out=out),
    ]


def _clamp(arguments: Arguments, out: Array) -> list[Call]:
    """Return calls for the bounds that there are; ``clamp_min`` has one."""
    calls: list[Call] = []
    source = arguments.first
    for name, function in (("min", np.maximum), ("max", np.minimum)):
        if arguments.value(name) is not None:
            bound = arguments.operand(name, out)
            calls.append(_ufunc(function, source, bound, out=out))
            source = out
    return calls


def _pow(arguments: Arguments, out: Array) -> list[Call]:
    _require(arguments.value("exponent") == 2 and out.dtype == arguments.first.dtype)
    return [_ufunc(np.square, arguments.first, out=out)]


def _masked_fill(arguments: Arguments, out: Array) -> list[Call]:
    mask, value = array(arguments.value("mask")), arguments.operand("value")
    return [
        copying(out, arguments.first),
        partial(np.copyto, out, value, "same_kind", mask),
    ]


def _logsumexp(arguments: Arguments, out: Array) -> list[Call]:
    first, dims = arguments.first, arguments.value("dim")
    _require(out.dtype == first.dtype and arguments.value("keepdim") and len(dims) == 1)
    (axis,) = dims
    reduce_sum: Any = np.add.reduce
    reduce_max: Any = np.maximum.reduce
    limit = np.asarray(np.finfo(out.dtype).max)
    highest, powers = np.empty_like(out), np.empty_like(first)
    return [
        partial(reduce_max, first, axis, None, highest, True),
        # A row of infinities has no finite maximum.
        _ufunc(np.maximum, highest, -limit, out=highest),
        _ufunc(np.minimum, highest, limit, out=highest),
        partial(np.subtract, first, highest, powers),
        _ufunc(np.exp, powers, out=powers),
        partial(reduce_sum, powers, axis, None, out, True),
        _ufunc(np.log, out, out=out),
        _ufunc(np.add, out, highest, out=out),
    ]


def _softplus(arguments: Arguments, out: Array) -> list[Call]:
    # Above the threshold torch returns the argument, as logaddexp does in float32.
    _require(out.dtype == np.float32)
    _require(arguments.value("beta") == 1 and arguments.value("threshold") == 20)
    zero = np.zeros((), out.dtype)
    return [_ufunc(np.logaddexp, arguments.first, zero, out=out)]


def _addcmul(arguments: Arguments, out: Array) -> list[Call]:
    first, second = (arguments.operand(name, out) for name in ("tensor1", "tensor2"))
    product = np.empty_like(out)
    calls: list[Call] = [_ufunc(np.multiply, first, second, out=product)]
    value = arguments.value("value")
    if value != 1:
        factor = np.asarray(value, dtype=out.dtype)
        calls.append(_ufunc(np.multiply, product, factor, out=product))
    added = arguments.operand("self", out)
    return [*calls, _ufunc(np.add, added, product, out=out)]


def _where(arguments: Arguments, out: Array) -> list[Call]:
    chosen, other = (array(arguments.value(name)) for name in ("self", "other"))
    _require(chosen.dtype == out.dtype == other.dtype)
    return [
        copying(out, other),
        partial(np.copyto, out, chosen, "same_kind", arguments.first),
    ]


def _reduction(function: np.ufunc) -> Builder:
    def build(arguments: Arguments, out: Array) -> list[Call]:
        dim = arguments.value("dim")
        axis = tuple(dim) if isinstance(dim, Sequence) else dim
        _require(out.dtype == arguments.first.dtype)
        _require(arguments.value("dtype") is None)
        keep = bool(arguments.value("keepdim"))
        axis = None if axis == () else axis
        reduce: Any = function.reduce  # Positional: keywords are parsed in every call.
        return [partial(reduce, arguments.first, axis, None, out, keep)]

    return build


def _argmax(arguments: Arguments, out: Array) -> list[Call]:
    _require(arguments.value("dim") is not None and not arguments.value("keepdim"))
    return [partial(arguments.first.argmax, arguments.value("dim"), out)]


def _cat(arguments: Arguments, out: Array) -> list[Call]:
    inputs = [array(tensor) for tensor in arguments.value("tensors")]
    axis = arguments.value("dim")
    ends = np.cumsum([part.shape[axis] for part in inputs])
    return _fill(np.split(out, ends[:-1], axis), inputs)


def _stack(arguments: Arguments, out: Array) -> list[Call]:
    inputs = [array(tensor) for tensor in arguments.value("tensors")]
    return _fill(list(np.moveaxis(out, arguments.value("dim"), 0)), inputs)


def _fill(parts: list[Array], inputs: list[Array]) -> list[Call]:
    pairs = list(zip(parts, inputs, strict=True))
    _require(all(part.dtype == source.dtype for part, source in pairs))
    return [copying(part, source) for part, source in pairs]


def _copy(arguments: Arguments, out: Array) -> list[Call]:
    _require(np.can_cast(arguments.first.dtype, out.dtype, "same_kind"))
    return [copying(out, arguments.first)]


def _affine(first: str, second: str) -> Builder:
    def build(arguments: Arguments, out: Array) -> list[Call]:
        _require(arguments.value("beta") == 1 and arguments.value("alpha") == 1)
        product = _product(arguments.operand(first), arguments.operand(second), out)
        added = arguments.operand("self", out)
        return [product, _ufunc(np.add, out, added, out=out)]

    return build


def _matmul(arguments: Arguments, out: Array) -> list[Call]:
    return [_product(arguments.operand("self"), arguments.operand("mat2"), out)]


def _product(first: Array, second: Array, out: Array) -> Call:
    _require(out.size * first.shape[-1] <= _PRODUCTS and out.dtype.kind == "f")
    if out.ndim == 2 and out.flags.c_contiguous:
        return partial(first.dot, second, out)
    return partial(np.matmul, first, second, out)


_BUILDERS: dict[str, Builder] = {
    **{name: _elementwise(function) for name, function in _ELEMENTWISE.items()},
    **{name: _reduction(function) for name, function in _REDUCTIONS.items()},
    **dict.fromkeys(COPIES, _copy),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    "rsub": _rsub,
    "relu": _relu,
    "pow": _pow,
    "masked_fill": _masked_fill,
    "logsumexp": _logsumexp,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "addcmul": _addcmul,
    "where": _where,
    "argmax": _argmax,
    "cat": _cat,
    "stack": _stack,
    "addmm": _affine("mat1", "mat2"),
    "baddbmm": _affine("batch1", "batch2"),
    "mm": _matmul,
    "bmm": _matmul,
}
