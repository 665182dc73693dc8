"""Keeps what small arrays hold, frame by frame, and gives it back a block at a time.

NumPy takes longer to assign a row of a few numbers than to assign a thousand of them.
So the memory in which such arrays stand side by side is kept as bytes, once per frame
for all of them, and becomes arrays again for many frames at once.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import ALIGNMENT, Key

Arrays = Mapping[Key, NDArray[Any]]


@final
class FrameBlocks:
    """Keeps the values of some arrays."""

    def __init__(self, arrays: Arrays) -> None:
        """Keep what stands in ``arrays``, which are dense and change in place."""
        self._pieces = [_Piece(piece) for piece in _side_by_side(arrays)]
        self.takes = [(piece.take, piece.kept.append) for piece in self._pieces]
        """What takes the bytes of each piece, and what keeps them."""

    def keep(self) -> None:
        """Keep what stands there now."""
        for take, keep in self.takes:
            keep(take())

    def give(self) -> dict[Key, NDArray[Any]]:
        """Return all that was kept since the last call, ``[frames, ...]``."""
        found: dict[Key, NDArray[Any]] = {}
        for piece in self._pieces:
            found |= piece.give()
        return found


@final
class _Piece:
    """Arrays in one piece of memory.

    Attributes:
        take: returns the bytes of the piece as it is.
        kept: such bytes, one entry per frame.
    """

    def __init__(self, arrays: Arrays) -> None:
        """Look at the memory from the first of ``arrays`` to the last."""
        first, *_, last = [*arrays.values()] * 2
        begin = _address(first)
        nbytes = _address(last) + last.nbytes - begin
        memory = memoryview(_owner(first)).cast("B")
        offset = begin - _address(np.frombuffer(memory, np.uint8))
        self.take: Callable[[], bytes] = memory[offset : offset + nbytes].tobytes
        self.kept: list[bytes] = []
        self._names = {key: str(number) for number, key in enumerate(arrays)}
        self._frame = np.dtype(
            {
                "names": list(self._names.values()),
                "formats": [(a.dtype, a.shape) for a in arrays.values()],
                "offsets": [_address(a) - begin for a in arrays.values()],
                "itemsize": nbytes,
            }
        )

    def give(self) -> dict[Key, NDArray[Any]]:
        """Return the arrays of all frames kept, and forget them."""
        frames = np.frombuffer(b"".join(self.kept), self._frame)
        self.kept.clear()
        return {key: frames[name] for key, name in self._names.items()}


def _side_by_side(arrays: Arrays) -> list[dict[Key, NDArray[Any]]]:
    """Divide arrays into those that share a piece of memory, but for small gaps."""
    pieces: list[dict[Key, NDArray[Any]]] = []
    end, memory = 0, -1
    for key in sorted(arrays, key=lambda key: _address(arrays[key])):
        array = arrays[key]
        begin, own = _address(array), id(_owner(array))
        if own != memory or begin - end > ALIGNMENT:
            pieces.append({})
        pieces[-1][key] = array
        end, memory = begin + array.nbytes, own
    return pieces


def _owner(array: NDArray[Any]) -> Any:
    """Return the buffer that ``array`` is a part of."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
