"""Sees the tensor operations of a call; records them, so they can be repeated.

A ``Recorder`` records every torch operation with its arguments and results. The tensors
are kept, so views remain valid: only operations that compute something have to be
repeated, into the same memory.

``item()`` and ``bool()`` are operations of torch, so the values that they read are
recorded. ``tolist()``, ``numpy()`` or an address give access to memory without an
operation. A policy that branches on such a value would repeat the recorded branch for
ever. ``HiddenReads`` records an operation for ``tolist()``, and refuses the others.
"""

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from marl_collect.weights.tensor_parts import is_dense, strided_parts

T = TypeVar("T")

_MEMORY = {
    *("numpy", "__array__", "__dlpack__", "data_ptr"),
    *("storage", "untyped_storage", "_typed_storage", "__reduce_ex__", "__repr__"),
    *("apply_", "map_", "map2_"),
}
"""Methods of tensors that let Python read memory."""
_NUMBERS = {
    *("item", "is_nonzero", "__bool__", "__int__", "__float__", "__complex__"),
    *("__index__", "__format__"),
}
"""Methods that run an operation, except inside some constructors and for some types."""
_SHAPED_BY_VALUES = {"_pack_padded_sequence", "_pad_packed_sequence"}
"""Operations that torch does not mark, although values decide on the result's shape."""
COPIES = ("clone", "_to_copy", "contiguous")
"""Operations that copy a tensor."""
_CONSTRUCTORS = {"tensor", "as_tensor", "asarray", "new_tensor", "new"}
"""Functions that read tensors in lists as numbers."""


class NotRepeatableError(Exception):
    """A call has effects that repeating its operations would not reproduce."""


@final
@dataclass(frozen=True, eq=False)
class TensorOp:
    """One operation, with its tensors.

    Attributes:
        function: of torch.
        args: positional arguments.
        kwargs: keyword arguments.
        result: tensors, or the Python value that was read from one.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    @cached_property
    def name(self) -> str:
        """The name of the operator, such as ``addmm``."""
        return str(self.function._schema.name).rpartition("::")[2]  # noqa: SLF001

    @property
    def random(self) -> bool:
        """Whether it draws from a generator of torch."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    @cached_property
    def reads(self) -> frozenset[int]:
        """Storages of the tensors among the arguments, which the operation keeps."""
        return storages((self.args, self.kwargs))

    @cached_property
    def makes(self) -> frozenset[int]:
        """Storages of the resulting tensors, which may have existed before."""
        return storages(self.result)

    @cached_property
    def writes(self) -> frozenset[int]:
        """Storages that it changes."""
        written: set[int] = set()
        for index, argument in enumerate(self.function._schema.arguments):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                passed = self.args[index : index + 1]
                written |= storages((passed, self.kwargs.get(argument.name)))
        return frozenset(written)


class OperationObserver(TorchDispatchMode, abc.ABC):
    """Sees every operation that runs in a block, as a context manager.

    Attributes:
        is_in_operation: whether an operation is running, or is being looked at.
    """

    is_in_operation = False

    @final
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and let ``ran`` see it."""
        del types
        self.is_in_operation = True
        try:
            result = func(*args, **(kwargs or {}))
            self.ran(TensorOp(func, args, kwargs or {}, result))
        finally:
            self.is_in_operation = False
        return result

    @abc.abstractmethod
    def ran(self, operation: TensorOp) -> None:
        """Take note of an operation that has just run."""


@final
class Recorder(OperationObserver):
    """Records operations.

    Attributes:
        operations: in their order.
    """

    def __init__(self) -> None:
        """Begin without operations."""
        super().__init__()
        self.operations: list[TensorOp] = []
        self._made: set[int] = set()

    def ran(self, operation: TensorOp) -> None:
        """Record the operation."""
        function = operation.function
        untagged = operation.name in _SHAPED_BY_VALUES
        if torch.Tag.dynamic_output_shape in function.tags or untagged:
            reason = f"the shape of {function}'s result depends on data"
            raise NotRepeatableError(reason)
        if torch.Tag.inplace_view in function.tags:
            # The operation that made the tensor could not write to it again.
            reason = f"{function} changes the shape of a tensor in place"
            raise NotRepeatableError(reason)
        if not all(map(is_dense, tensors(operation.result))):
            raise NotRepeatableError(f"{function} makes a tensor that is not strided")
        if operation.writes - self._made:
            reason = f"{function} changes an input or a buffer in place"
            raise NotRepeatableError(reason)
        self._made |= operation.makes - operation.reads
        self.operations.append(operation)


@final
class HiddenReads(TorchFunctionMode):
    """Raises an error when a value is read that ``recorder`` does not see.

    A list of values is compared with the tensor, which the recorder sees.

    Other readers of memory remain unseen: extensions in C, and
    ``torch.utils.dlpack.to_dlpack``.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Watch the functions that are called while ``recorder`` records."""
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, unless it reads memory."""
        del types
        kwargs = kwargs or {}
        # The implementation of a custom operator may read anything: it is repeated.
        if self._recorder.is_in_operation:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _MEMORY or _reads_arguments(name, args):
            raise _hidden(name)
        before = len(self._recorder.operations)
        result = func(*args, **kwargs)
        if name == "tolist":
            torch.equal(args[0], torch.tensor(result, dtype=args[0].dtype))
        elif name in _NUMBERS and len(self._recorder.operations) == before:
            raise _hidden(name)
        return result


def _reads_arguments(name: str, args: Any) -> bool:
    """Return whether a function reads tensors that tell it what to do."""
    if name in _CONSTRUCTORS:
        return any(holds_tensors(arg) for arg in args)
    # The tensor has the indices at which to split.
    return name == "tensor_split" and any(
        isinstance(arg, torch.Tensor) for arg in args[1:]
    )


def holds_tensors(value: Any) -> bool:
    """Return whether there are tensors in nested lists or tuples."""
    # Not by `tensors`, which does not look into subclasses of list.
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(v, torch.Tensor) or holds_tensors(v) for v in value)


def _hidden(name: str) -> NotRepeatableError:
    return NotRepeatableError(
        f"it reads values of a tensor with {name}, which a recording does not see: "
        "compute with torch, or read a number with item()"
    )


def record(call: Callable[[], T]) -> tuple[T, list[TensorOp]]:
    """Return the result of ``call`` and the operations that it ran.

    Raises:
        NotRepeatableError: if repeating the operations would not reproduce the call.
    """
    recorder = Recorder()
    with recorder, HiddenReads(recorder):
        result = call()
    return result, recorder.operations


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether shape, dtype and all values are equal; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not is_dense(first) or not is_dense(second):
        return _same_parts(first, second)
    return bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=True).all())


def _same_parts(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare tensors of which one at least is sparse or quantized."""
    if first.layout != second.layout or first.is_quantized or second.is_quantized:
        return first.layout == second.layout and torch.equal(first, second)
    pairs = zip(strided_parts(first), strided_parts(second), strict=True)
    return all(same(one, other) for one, other in pairs)


def storages(tree: Any) -> frozenset[int]:
    """Return the addresses of the memory of all tensors in a tree of arguments.

    Tensors without memory are left out.
    """
    parts = (part for tensor in tensors(tree) for part in strided_parts(tensor))
    return frozenset(part.untyped_storage().data_ptr() for part in parts) - {0}


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tree of tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
