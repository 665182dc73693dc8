"""Compares tensors with fixed places and copies them there, as bytes.

A torch call takes longer than the copy of a small tensor, and several times as long as
a numpy call. A memoryview is the fastest. For a policy of six small tensors these calls
are most of the time of an update.
"""

import ctypes
import os
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, final

import torch

# In bytes. A memoryview holds the interpreter lock while it copies; numpy releases it.
# This size takes about 0.1 ms, far less than Python's switch interval of 5 ms.
_SMALL = 1 << 20

# An array of bytes or a memoryview. `target[:] = source` works between equal types.
_Bytes = Any
_ADDRESS = torch.Tensor.data_ptr
_CONTIGUOUS = torch.Tensor.is_contiguous

# It stops at the first difference, unlike comparisons of arrays, and allocates nothing.
_differ = ctypes.CDLL("msvcrt" if os.name == "nt" else None).memcmp
_differ.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@final
class WeightCopies:
    """Compares and copies tensors repeatedly, from anywhere into the same places."""

    def __init__(self, names: Sequence[str], *places: Sequence[torch.Tensor]) -> None:
        """Prepare the copies.

        Args:
            names: of the tensors, for error messages.
            places: each has contiguous CPU tensors of the same shapes and dtypes, which
                are written to.
        """
        self._names = tuple(names)
        self._like = list(places[0])
        self._to = [[_as_bytes(target) for target in place] for place in places]
        self._places = [list(map(_ADDRESS, place)) for place in places]
        self._sizes = [target.nbytes for target in self._like]
        # The tensors read last. None if a tensor cannot be read as bytes.
        self._seen: list[torch.Tensor | None] = [None] * len(self._names)
        self._addresses = [0] * len(self._names)
        self._from: list[_Bytes] = [None] * len(self._names)
        self._pairs: list[list[tuple[_Bytes, _Bytes]]] = []
        self._all_plain = False

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the values of ``tensors`` from now on.

        Args:
            tensors: one per target, of its shape, on any device. Other dtypes are
                converted.

        Raises:
            ValueError: if a tensor has another shape than its target; it is named.
        """
        # Equal tensors have the same memory as in the last call, unless `tensor.data`
        # was replaced.
        if not (
            self._all_plain
            and all(map(is_, tensors, self._seen))
            and list(map(_ADDRESS, tensors)) == self._addresses
            # `tensor.data` may be another view of the same memory.
            and all(map(_CONTIGUOUS, tensors))
        ):
            self._all_plain = False  # It stays False if a check raises an error.
            for index, tensor in enumerate(tensors):
                self._find_source(index, tensor)
            self._pairs = [list(zip(to, self._from, strict=True)) for to in self._to]
            self._all_plain = None not in self._seen

    def differ(self, place: int, index: int) -> bool:
        """Return whether a tensor has other bytes than a place."""
        here, there = self._addresses[index], self._places[place][index]
        return bool(_differ(here, there, self._sizes[index]))

    def write(self, place: int, indices: Iterable[int] | None = None) -> None:
        """Write the tensors of these indices, or all, to a place."""
        pairs = self._pairs[place]
        for target, source in (
            pairs if indices is None else map(pairs.__getitem__, indices)
        ):
            target[:] = source

    def _find_source(self, index: int, tensor: torch.Tensor) -> None:
        target = self._like[index]
        if tensor.shape != target.shape:
            raise ValueError(
                f"The weights of {self._names[index]!r} must have shape "
                f"{tuple(target.shape)}, but have {tuple(tensor.shape)}."
            )
        plain = (
            tensor.device.type == "cpu"
            and tensor.dtype == target.dtype
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
        )
        # Other tensors are converted by torch at every call.
        source = tensor if plain else torch.empty_like(target).copy_(tensor.detach())
        self._seen[index] = tensor if plain else None
        self._from[index] = _as_bytes(source)
        self._addresses[index] = _ADDRESS(source)


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    # As uint8, because numpy does not have all dtypes of torch.
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if array.nbytes <= _SMALL else array
