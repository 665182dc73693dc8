"""Record what a call does to tensors, so that it can be repeated without Python.

A ``Recorder`` records every torch operation with the tensors that it read and made. The
tensors are kept, so views stay views: only operations that compute something have to be
repeated, into the same memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")


class NotRepeatableError(Exception):
    """A call does something that repeating its operations would not do."""


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

    @property
    def name(self) -> str:
        """The name of the operator, such as ``addmm``."""
        return str(self.function._schema.name).rpartition("::")[2]  # noqa: SLF001

    @property
    def random(self) -> bool:
        """Whether it draws from a generator of torch."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def reads(self) -> set[int]:
        """Storages of the tensors among the arguments."""
        return storages((self.args, self.kwargs))

    def makes(self) -> set[int]:
        """Storages of the tensors that result, which may be older."""
        return storages(self.result)

    def writes(self) -> set[int]:
        """Storages that it changes."""
        found: set[int] = set()
        for index, argument in enumerate(self.function._schema.arguments):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = self.args[index : index + 1]
                found |= storages((given, self.kwargs.get(argument.name)))
        return found


@final
class Recorder(TorchDispatchMode):
    """Records operations, as a context manager.

    Attributes:
        operations: in their order.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.operations: list[TensorOp] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and record it."""
        del types
        if torch.Tag.dynamic_output_shape in func.tags:
            raise NotRepeatableError(f"the shape of what {func} makes depends on data")
        result = func(*args, **(kwargs or {}))
        operation = TensorOp(func, args, kwargs or {}, result)
        if operation.writes() - self._made:
            raise NotRepeatableError(f"{func} changes an input or a buffer in place")
        self._made |= operation.makes() - operation.reads()
        self.operations.append(operation)
        return result


def record(call: Callable[[], T]) -> tuple[T, list[TensorOp]]:
    """Return what ``call`` returns, and the operations that it ran.

    Raises:
        NotRepeatableError: if it cannot be repeated from its operations.
    """
    with Recorder() as recorder:
        result = call()
    return result, recorder.operations


def storages(tree: Any) -> set[int]:
    """Return the addresses of the memory of all tensors in a tree of arguments.

    Tensors without memory are left out.
    """
    return {t.untyped_storage().data_ptr() for t in tensors(tree)} - {0}


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
