"""Sees the tensor operations of a call; records them, so they can be repeated.

A ``Recorder`` records every torch operation with its arguments and results. The tensors
are kept, so views remain valid: only operations that compute something have to be
repeated, into the same memory.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


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
    """Sees every operation that runs in a block, as a context manager."""

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
        result = func(*args, **(kwargs or {}))
        self.ran(TensorOp(func, args, kwargs or {}, result))
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
        if torch.Tag.dynamic_output_shape in function.tags:
            reason = f"the shape of {function}'s result depends on data"
            raise NotRepeatableError(reason)
        if torch.Tag.inplace_view in function.tags:
            # The operation that made the tensor could not write to it again.
            reason = f"{function} changes the shape of a tensor in place"
            raise NotRepeatableError(reason)
        if operation.writes - self._made:
            reason = f"{function} changes an input or a buffer in place"
            raise NotRepeatableError(reason)
        self._made |= operation.makes - operation.reads
        self.operations.append(operation)


def record(call: Callable[[], T]) -> tuple[T, list[TensorOp]]:
    """Return the result of ``call`` and the operations that it ran.

    Raises:
        NotRepeatableError: if repeating the operations would not reproduce the call.
    """
    with Recorder() as recorder:
        result = call()
    return result, recorder.operations


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether shape, dtype and all values are equal; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.isclose(first, second, rtol=0, atol=0, equal_nan=True).all())


def storages(tree: Any) -> frozenset[int]:
    """Return the addresses of the memory of all tensors in a tree of arguments.

    Tensors without memory are left out.
    """
    return frozenset(t.untyped_storage().data_ptr() for t in tensors(tree)) - {0}


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tree of tuples, lists and mappings."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    inner: Iterable[Any] = ()
    if isinstance(tree, Mapping):
        inner = tree.values()
    elif isinstance(tree, (tuple, list)):
        inner = tree
    for item in inner:
        yield from tensors(item)
