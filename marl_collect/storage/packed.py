"""Packed files: large frames, each compressed on its own and protected by a checksum.

A packed file holds the ``B * T`` frames of one key in row-major order::

    ends    uint64 [B * T]  where each stored frame ends, counted from the first one
    sums    uint32 [B * T]  CRC-32 of each stored frame
    frames  the stored frames, back to back

Within an episode the next observation equals the root observation of the following
frame. It is stored with no bytes, and ``unpack`` reads the root instead.
"""

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.checks import DatasetError
from marl_collect.storage.compression import COPY, load_codec

PACKED_FROM: Final = 4096
"""Bytes of the smallest frame that is packed. Smaller ones are faster to read raw."""

_WORTHWHILE: Final = 0.8
"""Frames are compressed if that reduces their size to this share or less."""
_TRIED: Final = 8
"""Frames that are compressed to find out."""
_ENTRY: Final = 12  # Bytes of the header per frame.


def pack(
    path: Path,
    frames: torch.Tensor,
    compression: str,
    root: torch.Tensor | None = None,
) -> tuple[str, int, int]:
    """Write the frames ``[B, T, ...]`` of one key.

    Args:
        path: of the new file.
        frames: what to store.
        compression: name of a codec.
        root: the root key of a key under ``next``: frames that equal its following
            frame are not stored.

    Returns:
        The codec, the size of the file in bytes, and the checksum of its header.
    """
    rows = _bytes(frames)
    following = None if root is None else _bytes(root)
    size, length = rows.shape[:2]
    flat = rows.reshape(size * length, -1)
    tried = flat[:: max(1, len(flat) // _TRIED)][:_TRIED]
    encode, _ = load_codec(compression)
    if sum(len(encode(frame)) for frame in tried) > _WORTHWHILE * tried.nbytes:
        compression = COPY
        encode, _ = load_codec(COPY)
    stored = []
    for row in range(size):
        for frame in range(length):
            if (
                following is not None
                and frame + 1 < length
                and np.array_equal(rows[row, frame], following[row, frame + 1])
            ):
                stored.append(b"")
            else:
                stored.append(encode(rows[row, frame]))
    ends = np.cumsum([len(each) for each in stored], dtype="<u8")
    sums = np.array([zlib.crc32(each) for each in stored], "<u4")
    header = ends.tobytes() + sums.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(header)
        file.writelines(stored)
    return compression, len(header) + int(ends[-1]), zlib.crc32(header)


@final
class PackedFile:
    """Reads frames of a packed file; no file stays open.

    Attributes:
        follows: ``[B * T]``, for which frames nothing is stored, because they equal the
            root's following frame.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int], codec: str, name: str = ""
    ) -> None:
        """Map the file.

        Args:
            path: a file whose size was checked.
            shape: of the batch, ``[B, T]``.
            codec: name of its codec.
            name: of the file in messages; its path if empty.
        """
        self._name = name or str(path)
        self._length = shape[1]
        _, self._decode = load_codec(codec)
        count = shape[0] * shape[1]
        size = path.stat().st_size
        if size < _ENTRY * count:
            raise DatasetError(f"{self._name} has no complete header.")
        content: Any = torch.from_file(
            str(path), shared=False, size=size, dtype=torch.uint8
        ).numpy()
        self._header = content[: _ENTRY * count]
        self._ends = self._header[: 8 * count].view("<u8").astype(np.int64)
        self._sums = self._header[8 * count :].view("<u4").tolist()
        self._stored = memoryview(content)[_ENTRY * count :]
        sizes = np.diff(self._ends, prepend=0)
        self.follows: NDArray[np.bool_] = sizes == 0
        if (sizes < 0).any() or int(self._ends[-1]) != len(self._stored):
            raise DatasetError(f"{self._name} has an inconsistent header.")

    def checksum(self) -> int:
        """Return the checksum of the header, which has those of all frames."""
        return zlib.crc32(self._header)

    def read(self, number: int, out: NDArray[np.uint8]) -> None:
        """Read one stored frame.

        Args:
            number: its position ``row * T + frame``.
            out: the bytes of the frame, to be filled.

        Raises:
            DatasetError: if the frame is damaged. The message names the file.
        """
        stored = self._frame(number)
        try:
            self._decode(stored, out)
        except (ValueError, RuntimeError) as error:
            raise DatasetError(f"{self._name} is damaged: {error}.") from error

    def verify(self) -> None:
        """Check the checksums of all stored frames.

        Raises:
            DatasetError: if a frame is damaged. The message names the file.
        """
        for number in np.flatnonzero(~self.follows).tolist():
            self._frame(number)

    def _frame(self, number: int) -> memoryview:
        begin = int(self._ends[number - 1]) if number else 0
        stored = self._stored[begin : int(self._ends[number])]
        if not stored or zlib.crc32(stored) != self._sums[number]:
            row, frame = divmod(number, self._length)
            raise DatasetError(
                f"{self._name} is damaged: the checksum of frame {frame} of row {row} "
                "is wrong. Restore the file from a copy."
            )
        return stored


def unpack(
    files: Mapping[Key, PackedFile],
    wanted: Collection[Key],
    numbers: NDArray[np.int64],
    out: Mapping[Key, torch.Tensor],
    places: NDArray[np.int64],
) -> None:
    """Read frames of packed keys, and restore the next observations not stored.

    Args:
        files: the packed files of a batch, including the roots of wanted keys.
        wanted: keys to read.
        numbers: positions ``row * T + frame`` of the frames, ``[n]``.
        out: contiguous tensors ``[m, ...]`` to fill, by key.
        places: position in ``out`` of each frame, ``[n]``.
    """
    decoded: dict[tuple[Key, int], NDArray[np.uint8]] = {}
    for key in wanted:
        file, root = files[key], root_of(key, files)
        rows = _bytes(out[key].unsqueeze(0))[0]
        follows = file.follows[numbers].tolist()
        for number, place, shared in zip(
            numbers.tolist(), places.tolist(), follows, strict=True
        ):
            source = (root, number + 1) if shared else (key, number)
            # A frame and the one after it are often both wanted: decode each once.
            before = decoded.get(source)
            if before is None:
                files[source[0]].read(source[1], rows[place])
                decoded[source] = rows[place]
            else:
                rows[place] = before


def root_of(key: Key, packed: Collection[Key]) -> Key:
    """Return the packed root key whose frames ``key`` repeats, or ``key`` itself."""
    root = key[1:]
    return root if key[0] == "next" and root in packed else key


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a view ``[B, T, bytes]`` of a tensor ``[B, T, ...]``."""
    tensor = tensor.detach().cpu().contiguous()
    size, length = tensor.shape[:2]
    flat: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(size, length, -1)
