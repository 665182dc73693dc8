"""A device whose memory the host reaches by copies only, simulated on the CPU.

``with FarDevice() as far:`` its tensors have the device ``FAR``. As on a GPU, they
cannot be read or mixed with those of the host, except by copies, which are counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

FAR = torch.device("maia:0")
"""A type that torch knows, whose tensors it has no code for."""


class FarTensor(torch.Tensor):
    """A tensor of ``FAR``; ``data_there`` has its values."""

    data_there: torch.Tensor

    @staticmethod
    def __new__(cls, there: torch.Tensor) -> Self:
        new: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            there.shape,
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=torch.device("meta"),  # Torch has code to select this device.
        )
        new.data_there = there
        return new

    def __init__(self, there: torch.Tensor) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return FAR

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} on {FAR} outside of FarDevice")


@dataclass(frozen=True)
class Copy:
    """A copy between the host and ``FAR``.

    Attributes:
        nbytes: its size.
        pinned: whether the memory of the host is pinned.
        waits: whether the host waits for it.
    """

    nbytes: int
    pinned: bool
    waits: bool


class FarDevice(TorchDispatchMode):
    """Runs operations on ``FAR``, and counts copies.

    Attributes:
        sent: the copies to the device.
        received: the copies from it.
        reads: operations that needed values from it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Copy] = []
        self.received: list[Copy] = []
        self.reads: list[str] = []
        self._pinned: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [
            t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        ]
        is_far = any(isinstance(t, FarTensor) for t in tensors)
        pins = kwargs.pop("pin_memory", None)
        target = kwargs.get("device")
        if target is not None:
            target = FAR if target.type == "meta" else target
            kwargs["device"] = torch.device("cpu")
        there = FAR if is_far else torch.device("cpu")
        if name == "_to_copy":
            source = args[0]
            there = source.device if target is None else target
            self._note(source, there, source, kwargs.pop("non_blocking", False))
        elif name == "copy_":
            is_free = kwargs.get("non_blocking", False) or args[2:3] == (True,)
            there = args[0].device
            near = args[1] if there == FAR else args[0]
            self._note(args[1], there, near, is_free)
        else:
            if target is not None:
                there = target
            near = [t for t in tensors if not isinstance(t, FarTensor) and t.ndim]
            assert not (is_far and near), f"{name} mixes tensors of {FAR} and the CPU"
            if is_far and (name in READS or (name in INDEXING and _by_mask(args[1]))):
                self.reads.append(name)
        here, named = tree_map_only(FarTensor, lambda t: t.data_there, (args, kwargs))
        out = func(*here, **named)
        if there == FAR:
            out = _wrapped(func, args, kwargs, out)
        elif pins:
            self._pinned.append(out)
        return args[0] if name == "copy_" else out

    def _note(
        self, source: torch.Tensor, there: torch.device, near: Any, is_free: Any
    ) -> None:
        if source.device == there:
            return
        address = None
        if not isinstance(near, FarTensor):
            address = near.untyped_storage().data_ptr()
        pinned = any(
            memory.untyped_storage().data_ptr() == address for memory in self._pinned
        )
        copies = self.sent if there == FAR else self.received
        copies.append(Copy(source.nbytes, pinned, not (is_free and pinned)))


def _wrapped(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Return tensors of ``FAR`` for what an operation returned."""
    if out is None or "out" in kwargs:
        return kwargs.get("out")
    name = func.overloadpacket.__name__
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    new = tree_map_only(torch.Tensor, FarTensor, out)
    if func.is_view:
        for view in tree_leaves(new):
            torch._functionalize_unsafe_set(view, args[0])
    return new


def _by_mask(indices: Any) -> bool:
    """Whether one of the indices is a mask, so the number of rows is unknown."""
    masks = torch.bool, torch.uint8
    return any(i is not None and i.dtype in masks for i in indices)


READS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy"),
    *("masked_select", "repeat_interleave", "unique_dim", "_unique", "_unique2"),
    *("unique_consecutive", "unique_dim_consecutive", "bincount", "argwhere"),
}
"""Operations whose result, or its shape, the host needs from the device."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


@contextmanager
def pinned_for_far(monkeypatch: Any) -> Iterator[FarDevice]:
    """Use the device, and pin the host's memory for it as for a GPU."""
    from marl_collect.core import device_check

    make = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Copy to the device afterwards: torch hides this copy from modes."""
        return make(*args, **kwargs).to(device or "cpu")

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(device_check, "pins", lambda device: device.type == FAR.type)
    with FarDevice() as far:
        yield far
