"""The table of codecs. Nothing here imports torch, so the command line starts fast."""

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


def check_compression(name: str) -> None:
    """Check the name of a compression.

    Raises:
        ValueError: if there is no such compression.
    """
    if name not in COMPRESSIONS:
        raise ValueError(
            f"compression is {name!r}, but must be one of {', '.join(COMPRESSIONS)}."
        )


def load_codec(
    name: str,
) -> tuple[Callable[[Any], bytes], Callable[[Any, NDArray[np.uint8]], Any]]:
    """Return the functions that encode a frame, and decode one into memory."""
    module = CODECS[name]
    if module is None:
        return (lambda frame: frame.tobytes()), _copy
    codec = importlib.import_module(module)
    return lambda frame: codec.compress(frame, 1), codec.decompress


def _copy(stored: Any, out: NDArray[np.uint8]) -> None:
    out[:] = np.frombuffer(stored, np.uint8)
