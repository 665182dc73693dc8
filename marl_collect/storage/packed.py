"""Packed keys: large frames, each compressed on its own and protected by a checksum.

A batch has a table for each packed key, and its frames behind the tables::

    ends    uint64 [B * T]  where each stored frame ends, counted from the first one
    sums    uint32 [B * T]  CRC-32 of each stored frame

A next value that equals the root value of the following frame is stored with no bytes.

Nothing here imports torch, so the command line starts fast.
"""

import functools
import importlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from marl_collect.storage.checks import DatasetError

Compression = Literal["lz4", "zstd", "none"]
"""What a writer does with large frames; ``"none"`` stores raw numbers."""

COMPRESSIONS: Final[tuple[str, ...]] = get_args(Compression)
COPY: Final = "copy"
CODECS: Final = {"lz4": "numcodecs.lz4", "zstd": "numcodecs.zstd", COPY: None}
"""Codecs of stored frames by name, each with its module. ``"copy"`` is for frames that
do not compress."""

RECORDS_FROM: Final = 512
"""Bytes of a stored record from which on packing the records is tried."""
PACKED_FROM: Final = 4096
"""Bytes of a frame from which a key is packed. Smaller ones are faster to read in
records."""
ENTRY: Final = 12
"""Bytes of the table per frame."""
_WORTHWHILE: Final = 0.8
"""Frames are compressed if that reduces their size to this share or less."""
_TRIED: Final = 8
"""Frames that are compressed to find out."""
_ZSTD: Final = bytes.fromhex("28b52ffd")
_LEAST_ZSTD: Final = 9  # Magic number, descriptor, size, and the header of a block.


def check_compression(name: str, names: Sequence[str] = COMPRESSIONS) -> None:
    """Check that the name of a compression is one of ``names``.

    Raises:
        ValueError: if there is no such compression.
    """
    if name not in names:
        raise ValueError(
            f"compression is {name!r}, but must be one of {', '.join(names)}."
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


def compressed_share(frames: NDArray[np.uint8], compression: str) -> float:
    """Return the size of compressed frames ``[n, bytes]`` relative to their own."""
    encode, _ = load_codec(compression)
    tried = frames[:: max(1, len(frames) // _TRIED)][:_TRIED]
    return sum(len(encode(frame)) for frame in tried) / max(1, tried.nbytes)


def pack(
    frames: NDArray[np.uint8], follows: NDArray[np.bool_], compression: str
) -> tuple[str, bytes, list[Any]]:
    """Encode the frames ``[n, bytes]`` of one key.

    Args:
        frames: what to store.
        follows: ``[n]``, frames of which nothing is stored.
        compression: name of a codec.

    Returns:
        The codec, the table, and the stored frames.
    """
    if compressed_share(frames, compression) > _WORTHWHILE:
        compression = COPY
    encode, _ = load_codec(compression)
    stored = [
        b"" if shared else encode(frame)
        for frame, shared in zip(frames, follows.tolist(), strict=True)
    ]
    ends = np.cumsum([len(frame) for frame in stored], dtype="<u8")
    sums = np.array([zlib.crc32(frame) for frame in stored], "<u4")
    return compression, ends.tobytes() + sums.tobytes(), stored


@final
@dataclass(frozen=True)
class PackedFrames:
    """The frames of a packed key of one batch.

    Attributes:
        name: of the key in messages.
        codec: name of the codec.
        begins: ``[n]``, position in the segment of each stored frame.
        ends: ``[n]``, position behind it.
        sums: ``[n]``, CRC-32 of each.
    """

    name: str
    codec: str
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sums: NDArray[np.uint32]

    @classmethod
    def of(
        cls, name: str, codec: str, table: bytes, first: int, size: int
    ) -> "PackedFrames":
        """Read the table of a key.

        Args:
            name: of the key in messages.
            codec: name of the codec.
            table: the table.
            first: position in the segment of the first stored frame.
            size: bytes of all stored frames.

        Raises:
            DatasetError: if there is no such codec, or the table is inconsistent.
        """
        if codec not in CODECS:
            raise DatasetError(
                f"{name} has the codec {codec!r}, which this version of marl_collect "
                "does not have. Install a newer one."
            )
        count = len(table) // ENTRY
        ends = np.frombuffer(table, "<u8", count).astype(np.int64)
        sums = np.frombuffer(table, "<u4", count, 8 * count)
        sizes = np.diff(ends, prepend=0)
        if (sizes < 0).any() or (int(ends[-1]) if count else 0) != size:
            raise DatasetError(f"{name} has an inconsistent table of frames.")
        ends += first
        return cls(name, codec, ends - sizes, ends, sums)

    def follows(self) -> NDArray[np.bool_]:
        """Return for which frames nothing is stored: ``[n]``."""
        return self.begins == self.ends

    def extent(self, number: int) -> tuple[int, int]:
        """Return where a stored frame begins and ends in the segment."""
        return int(self.begins[number]), int(self.ends[number])

    def stored(self, segment: Any, number: int) -> Any:
        """Return the stored bytes of a frame.

        Raises:
            DatasetError: if they are damaged.
        """
        begin, end = self.extent(number)
        frame = segment[begin:end]
        if not len(frame) or zlib.crc32(frame) != self.sums[number]:
            raise DatasetError(
                f"{self.name} is damaged: the checksum of frame {number} of the batch "
                "is wrong. Restore the file from a copy."
            )
        return frame

    def read(self, segment: Any, number: int, out: NDArray[np.uint8]) -> None:
        """Read one stored frame.

        Args:
            segment: the bytes of the segment.
            number: position ``row * T + t`` of the frame.
            out: the bytes of the frame, to be filled.

        Raises:
            DatasetError: if the frame is damaged.
        """
        stored = self.stored(segment, number)
        decode: Callable[[Any, NDArray[np.uint8]], object] = load_codec(self.codec)[1]
        try:
            decode(stored, out)
        except (ValueError, RuntimeError) as error:
            raise DatasetError(f"{self.name} is damaged: {error}.") from error
