"""Records small arrays frame by frame, and returns them for many frames at once.

The overhead of a NumPy assignment exceeds the cost of copying a few numbers. So small
arrays are allocated next to each other. Their memory is recorded as one ``bytes``
object per frame, and the frames are converted to arrays in blocks.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import ALIGNMENT, Key

Arrays = Mapping[Key, NDArray[Any]]


@final
class FrameBlocks:
    """Records the values of several arrays."""

    def __init__(self, arrays: Arrays) -> None:
        """Record ``arrays``, which are dense and change in place."""
        # Of arrays that are adjacent: their keys, how a frame has them, and the bytes
        # of each recorded frame.
        self._pieces: list[tuple[list[Key], np.dtype[np.void], list[bytes]]] = []
        self.recorders: list[tuple[Callable[[], bytes], Callable[[bytes], None]]] = []
        """For each piece, a function that copies its bytes and one that stores them."""
        for piece in _side_by_side(arrays):
            snapshot, frame = _bytes_of(piece)
            recorded: list[bytes] = []
            self._pieces.append((list(piece), frame, recorded))
            self.recorders.append((snapshot, recorded.append))

    def record(self) -> None:
        """Record the current values."""
        for snapshot, store in self.recorders:
            store(snapshot())

    def drain(self) -> dict[Key, NDArray[Any]]:
        """Return and forget all recorded values, ``[frames, ...]``."""
        values: dict[Key, NDArray[Any]] = {}
        for keys, frame, recorded in self._pieces:
            frames = np.frombuffer(b"".join(recorded), frame)
            recorded.clear()
            values |= {key: frames[str(number)] for number, key in enumerate(keys)}
        return values


def _bytes_of(arrays: Arrays) -> tuple[Callable[[], bytes], np.dtype[np.void]]:
    """Return how to copy the memory of adjacent arrays, and where they are in it."""
    first, *_, last = [*arrays.values()] * 2
    start = _address(first)
    nbytes = _address(last) + last.nbytes - start
    memory = memoryview(_owner(first)).cast("B")
    offset = start - _address(np.frombuffer(memory, np.uint8))
    frame = np.dtype(
        {
            "names": [str(number) for number in range(len(arrays))],
            "formats": [(a.dtype, a.shape) for a in arrays.values()],
            "offsets": [_address(a) - start for a in arrays.values()],
            "itemsize": nbytes,
        }
    )
    return memory[offset : offset + nbytes].tobytes, frame


def _side_by_side(arrays: Arrays) -> list[dict[Key, NDArray[Any]]]:
    """Group arrays that are adjacent in memory, apart from small gaps."""
    pieces: list[dict[Key, NDArray[Any]]] = []
    end, memory = 0, -1
    for key in sorted(arrays, key=lambda key: _address(arrays[key])):
        array = arrays[key]
        start, owner = _address(array), id(_owner(array))
        if owner != memory or start - end > ALIGNMENT:
            pieces.append({})
        pieces[-1][key] = array
        end, memory = start + array.nbytes, owner
    return pieces


def _owner(array: NDArray[Any]) -> Any:
    """Return the buffer that ``array`` is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
