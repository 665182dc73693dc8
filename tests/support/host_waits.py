"""Counts kernels, and what would wait for a GPU, without a GPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy"),
    *("masked_select", "repeat_interleave", "unique_dim", "_unique", "_unique2"),
    *("unique_consecutive", "unique_dim_consecutive", "bincount", "argwhere"),
}
"""Operations whose result, or its shape, the host needs."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
FREE = {"empty", "detach", "alias", "lift_fresh", "_unsafe_view", "empty_strided"}
"""Operations that start no kernel."""
MOVES = (
    "cpu",
    "numpy",
    "tolist",
    "item",
    "__array__",
    "__bool__",
    "__int__",
    "pin_memory",
)
"""Methods of tensors that copy to the host, some of them without an operation."""


class Operations(TorchDispatchMode):
    """Counts operations while it is on.

    Attributes:
        kernels: by name; those on several tensors count once for each.
        waits: what would wait, by name.
        outside: whether a simulator or a policy computes, which is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.outside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not self.outside:
            if name in READS or (name in INDEXING and by_mask(args[1])):
                self.waits[name] += 1
            if not func.is_view and name not in FREE:
                self.kernels[name] += len(args[0]) if "_foreach" in name else 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count, also the methods that are no operations."""
        before = {name: getattr(torch.Tensor, name) for name in MOVES}
        from_numpy = torch.from_numpy

        def counting(name: str, method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self.outside:
                    self.waits[name] += 1
                return method(*args, **kwargs)

            return call

        for name, method in before.items():
            setattr(torch.Tensor, name, counting(name, method))
        torch.from_numpy = counting("from_numpy", from_numpy)
        try:
            with self:
                yield
        finally:
            torch.from_numpy = from_numpy
            for name, method in before.items():
                setattr(torch.Tensor, name, method)


def by_mask(indices: Any) -> bool:
    """Whether one of the indices is a mask, so the number of rows is unknown."""
    masks = torch.bool, torch.uint8
    return any(i is not None and i.dtype in masks for i in indices)
