"""Packed keys: large frames, each compressed on its own and protected by a checksum.

A batch has a table for each packed key, and its frames behind the tables::

    ends    uint64 [B * T]  where each stored frame ends, counted from the first one
    sums    uint32 [B * T]  CRC-32 of each stored frame

A next value that equals the root value of the following frame is stored with no bytes.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.storage.checks import DatasetError
from marl_collect.storage.compression import CODECS, COPY, load_codec

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

    def follows(self, numbers: Any = slice(None)) -> NDArray[np.bool_]:
        """Return for which frames, of all or of some, nothing is stored: ``[n]``."""
        return np.asarray(self.begins[numbers] == self.ends[numbers])

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
