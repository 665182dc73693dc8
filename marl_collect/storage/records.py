"""Records: the small keys of a frame as one row of bytes, without constant bytes.

Most bytes of experience do not vary: flags, the upper bytes of integers, unused parts
of observations. A layout says for each byte of a record whether it is constant, has two
values, or may have any. Constant bytes are not stored, and bytes with two values take
one bit. Every record of a layout has the same size, so any frame is read directly.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.storage.checks import DatasetError

Bytes = NDArray[np.uint8]
_CONSTANT: Final = 0
_TWO: Final = 1
_ANY: Final = 2
_PIECE: Final = 16
"""Bytes from which copying a piece is faster than choosing its bytes one by one."""


@final
@dataclass(frozen=True, eq=False)
class RecordLayout:
    """How the bytes of a record are stored.

    A stored record has the bits of all bytes with two values, lowest bit first, then
    the bytes that may have any value.

    Attributes:
        kind: ``[R]``, of each byte: 0 constant, 1 two values, 2 any value.
        low: ``[R]``, the constant, or the value of a bit 0.
        high: ``[R]``, the value of a bit 1.
    """

    kind: Bytes
    low: Bytes
    high: Bytes

    @classmethod
    def of(cls, records: Bytes) -> Self:
        """Return the smallest layout for records ``[n, R]``, with n of at least 1."""
        low, high = records.min(0), records.max(0)
        two = ((records == low) | (records == high)).all(0)
        kind = np.where(low == high, _CONSTANT, np.where(two, _TWO, _ANY))
        return cls(kind.astype(np.uint8), low, high)

    @cached_property
    def bits(self) -> NDArray[np.int64]:
        """Positions in the record of the bytes with two values."""
        return np.flatnonzero(self.kind == _TWO)

    @cached_property
    def any(self) -> NDArray[np.int64]:
        """Positions in the record of the bytes with any value."""
        return np.flatnonzero(self.kind == _ANY)

    @property
    def arrays(self) -> tuple[Bytes, Bytes, Bytes]:
        """Kind, low and high."""
        return self.kind, self.low, self.high

    @cached_property
    def bit_bytes(self) -> int:
        """Bytes of a stored record that hold bits."""
        return -(-len(self.bits) // 8)

    @cached_property
    def size(self) -> int:
        """Bytes of a stored record."""
        return self.bit_bytes + len(self.any)

    @cached_property
    def _columns(self) -> dict[tuple[int, int], "Column"]:
        return {}

    def column(self, begin: int, end: int) -> "Column":
        """Return what reads the bytes ``[begin, end)``; it is prepared once."""
        if (begin, end) not in self._columns:
            self._columns[begin, end] = Column(self, begin, end)
        return self._columns[begin, end]

    def joined(self, other: "RecordLayout", wide: NDArray[np.bool_]) -> "RecordLayout":
        """Return this layout if it can store what the other can, or one for both.

        Args:
            other: of records of the same size.
            wide: ``[R]``, bytes of elements of several bytes, which may have any value
                as soon as they vary: numbers of episodes and the like grow on.
        """
        low = np.minimum(self.low, other.low)
        high = np.maximum(self.high, other.high)
        two = np.ones(len(low), np.bool_)
        for layout in (self, other):
            for values in (layout.low, layout.high):
                two &= (values == low) | (values == high)
        both = np.where(low == high, _CONSTANT, np.where(two, _TWO, _ANY))
        kind = np.maximum(np.maximum(self.kind, other.kind), both).astype(np.uint8)
        kind[wide & (kind > self.kind)] = _ANY
        equal = (low == self.low) & (high == self.high)
        if ((kind == self.kind) & (equal | (kind == _ANY))).all():
            return self
        return RecordLayout(kind, low, high)

    def widened(self, begin: int, end: int, size: int) -> "RecordLayout":
        """Return a layout in which all bytes of an element vary if one does.

        The upper bytes of floats vary sooner or later; a new layout each time would
        make reading slower.

        Args:
            begin: first byte of the elements.
            end: behind the last one.
            size: bytes of an element.
        """
        kind = self.kind.copy()
        elements = kind[begin:end].reshape(-1, size)
        elements[(elements == _ANY).any(1)] = _ANY
        return RecordLayout(kind, self.low, self.high)

    def encode(self, records: Bytes) -> Bytes:
        """Return records ``[n, R]`` as they are stored, ``[n, size]``."""
        ones = records[:, self.bits] == self.high[self.bits]
        bits = np.packbits(ones, axis=1, bitorder="little")
        stored = np.concatenate([bits, records[:, self.any]], 1)
        return np.ascontiguousarray(stored)

    def equals(self, other: "RecordLayout") -> bool:
        """Return whether records of both are stored in the same way."""
        return self is other or all(map(np.array_equal, self.arrays, other.arrays))

    def to_json(self) -> dict[str, str]:
        """Return the three arrays in base64."""
        texts = (base64.b64encode(array.tobytes()).decode() for array in self.arrays)
        return dict(zip(("kind", "low", "high"), texts, strict=True))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], size: int) -> Self:
        """Return the layout of records of ``size`` bytes.

        Raises:
            DatasetError: if an array has another size, or there is no such kind.
        """
        kind, low, high = (
            np.frombuffer(base64.b64decode(data[name], validate=True), np.uint8)
            for name in ("kind", "low", "high")
        )
        if not len(kind) == len(low) == len(high) == size or (kind > _ANY).any():
            raise DatasetError(f"A layout is not one of records of {size:,} bytes.")
        return cls(kind, low, high)


NOTHING: Final = RecordLayout.of(np.empty((1, 0), np.uint8))
"""The layout of records without bytes."""


@final
class Column:
    """Reads consecutive bytes of records, such as those of one key.

    Attributes:
        is_constant: whether the bytes are equal in all records.
    """

    def __init__(self, layout: RecordLayout, begin: int, end: int) -> None:
        """Prepare reading the bytes ``[begin, end)``."""
        self._size = end - begin
        kind, low, high = (array[begin:end] for array in layout.arrays)
        bits = np.cumsum(layout.kind == _TWO) - 1
        stored = np.cumsum(layout.kind == _ANY) - 1 + layout.bit_bytes
        bits, stored = bits[begin:end], stored[begin:end]
        self.is_constant = bool((kind == _CONSTANT).all())
        # Where each byte is: in the record, behind it those of bits, then constants.
        self._two = np.flatnonzero(kind == _TWO)
        if len(self._two):
            first, last = bits[self._two[0]], bits[self._two[-1]]
            self._bit_bytes = slice(int(first) // 8, int(last) // 8 + 1)
            self._bits = slice(int(first) % 8, int(last) - int(first) // 8 * 8 + 1)
        self._low, self._step = low[self._two], high[self._two] - low[self._two]
        self._constants, inverse = np.unique(
            low[kind == _CONSTANT], return_inverse=True
        )
        gather = np.where(kind == _ANY, stored, 0).astype(np.intp)
        gather[self._two] = layout.size + np.arange(len(self._two))
        gather[kind == _CONSTANT] = layout.size + len(self._two) + inverse
        self._gather = gather
        self._all_two = len(self._two) == self._size
        self._low_all = low
        # Few long pieces are copied one by one, many short ones byte by byte.
        anywhere = np.flatnonzero(kind == _ANY)
        pieces = np.split(anywhere, np.flatnonzero(np.diff(anywhere) > 1) + 1)
        self._pieces = [
            (int(p[0]), int(p[-1]) + 1, int(stored[p[0]])) for p in pieces if len(p)
        ]
        self._by_piece = not len(self._two) and (
            len(self._pieces) <= 1 or len(self._pieces) * _PIECE < self._size
        )

    def read(self, stored: Bytes) -> Bytes:
        """Return the bytes ``[n, end - begin]``, contiguous, of stored records."""
        n = len(stored)
        if self._by_piece:
            out = np.empty((n, self._size), np.uint8)
            out[:] = self._low_all
            for begin, end, at in self._pieces:
                out[:, begin:end] = stored[:, at : at + end - begin]
            return out
        parts = [stored]
        if len(self._two):
            values = np.unpackbits(
                stored[:, self._bit_bytes], axis=1, bitorder="little"
            )[:, self._bits]
            values = values * self._step + self._low
            if self._all_two:
                return values
            parts.append(values)
        if len(self._constants):
            constants = np.empty((n, len(self._constants)), np.uint8)
            constants[:] = self._constants
            parts.append(constants)
        return np.concatenate(parts, 1).take(self._gather, axis=1)
