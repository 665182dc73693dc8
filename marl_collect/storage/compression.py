"""The table of codecs. Nothing here imports torch, so the command line starts fast."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Compression = Literal["lz4", "zstd", "none"]
"""What a writer does with large frames; ``"none"`` stores raw numbers."""

COMPRESSIONS: Final[tuple[str, ...]] = get_args(Compression)
COPY: Final = "copy"
CODECS: Final = {"lz4": "numcodecs.lz4", "zstd": "numcodecs.zstd", COPY: None}
"""Codecs of stored frames by name, each with its module. ``"copy"`` is for frames that
do not compress."""

_ZSTD: Final = bytes.fromhex("28b52ffd")
_LEAST_ZSTD: Final = 9  # Magic number, descriptor, size, and the header of a block.


def check_compression(name: str) -> None:
    """Check the name of a compression.

    Raises:
        ValueError: if there is no such compression.
    """
    if name not in COMPRESSIONS:
        raise ValueError(
            f"compression is {name!r}, but must be one of {', '.join(COMPRESSIONS)}."
        )


@functools.cache
def load_codec(
    name: str,
) -> tuple[Callable[[Any], bytes], Callable[[Any, NDArray[np.uint8]], Any]]:
    """Return the functions that encode a frame, and decode one into memory.

    Decoding raises a ``ValueError`` if the frame does not fill the memory exactly.
    """
    module = CODECS[name]
    if module is None:
        return (lambda frame: frame.tobytes()), _copy
    codec = importlib.import_module(module)
    size_of = {"lz4": _size_of_lz4, "zstd": _size_of_zstd}[name]

    def decode(stored: Any, out: NDArray[np.uint8]) -> None:
        # The codecs leave the end of `out` as it is if the frame is shorter.
        size = size_of(bytes(stored[:18]))
        if size != len(out):
            raise ValueError(f"a frame has {size:,} bytes, not {len(out):,}")
        codec.decompress(stored, out)

    return lambda frame: codec.compress(frame, 1), decode


def _copy(stored: Any, out: NDArray[np.uint8]) -> None:
    out[:] = np.frombuffer(stored, np.uint8)


def _size_of_lz4(header: bytes) -> int:
    """Return the size that numcodecs stores in front of the block."""
    return int.from_bytes(header[:4], "little")


def _size_of_zstd(header: bytes) -> int:
    """Return the size of the content, from the frame header (RFC 8878, 3.1.1.1).

    Raises:
        ValueError: if the header does not have it. The writer's always do.
    """
    if len(header) < _LEAST_ZSTD or not header.startswith(_ZSTD):
        raise ValueError("a frame is not of Zstandard")
    descriptor = header[4]
    flag, single, dictionary = descriptor >> 6, descriptor >> 5 & 1, descriptor & 3
    length = (single, 2, 4, 8)[flag]
    if not length:
        raise ValueError("a frame does not say its size")
    begin = 5 + (not single) + (0, 1, 2, 4)[dictionary]
    size = int.from_bytes(header[begin : begin + length], "little")
    return size + 256 if flag == 1 else size
