"""Converts the arguments of a recorded operation for numpy."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import bytes_of
from marl_collect.policies.fused.record import TensorOp

Array = NDArray[Any]
Call = Callable[[], Any]
IsConstant = Callable[[torch.Tensor], bool]


class UnsuitableError(Exception):
    """An argument that numpy does not support, or treats in another way."""


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
        if operand.dtype != dtype:
            raise UnsuitableError
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
    if not fits:
        raise UnsuitableError
    return array


def array(tensor: torch.Tensor) -> Array:
    """Return the memory of a tensor as an array.

    Raises:
        UnsuitableError: if numpy does not support the tensor.
    """
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        raise UnsuitableError
    try:
        memory: Array = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:
        raise UnsuitableError from error
    return memory
