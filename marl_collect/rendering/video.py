"""Writes pictures to a video file."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_collect.errors import imports_of
from marl_collect.files.atomic import require_folder
from marl_collect.options import Option, require
from marl_collect.rendering.pictures import Picture, enlarge, visible

_SUFFIXES = (".mp4", ".gif", ".mkv", ".mov")


def write_video(
    path: str | Path,
    frames: Iterable[Picture],
    *,
    fps: float = 30.0,
    scale: int | None = None,
) -> int:
    """Write pictures to a video; the file appears when it is complete.

    Needs the extra ``video``.

    Args:
        path: ending in ``.mp4``, ``.mkv``, ``.mov`` or ``.gif``.
        frames: uint8 ``[height, width, 3]`` each, such as an array ``[T, h, w, 3]`` or
            what ``play`` yields; all of one size.
        fps: pictures per second, more than 0.
        scale: integer factor to enlarge by; if None, small pictures are enlarged.

    Returns:
        The number of frames.

    Raises:
        ImportError: if imageio is not installed; says what to install.
        ValueError: if the suffix is unknown, there are no frames or one is no such
            picture, ``fps`` is not more than 0, or ``scale`` is less than 1.
    """
    target = Path(path)
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps must be a number more than 0, but is {fps}.")
    scale = require("scale", scale, int | None, Option("", at_least=1))
    check_video(target)
    partial = target.with_name(f".{target.stem}.incomplete{target.suffix}")
    writer: Any = None
    count = 0
    try:
        for frame in frames:
            picture = np.asarray(frame)
            if picture.dtype != np.uint8 or picture.shape[2:] != (3,):
                raise ValueError(
                    f"Frame {count} must be uint8 [height, width, 3], but is "
                    f"{list(picture.shape)} of {picture.dtype}."
                )
            if writer is None:
                writer = _open(partial, fps)
            large = visible(picture) if scale is None else enlarge(picture, scale)
            writer.append_data(_even(large))
            count += 1
        if writer is None:
            raise ValueError(f"There are no frames to write to {target}.")
        writer.close()
        partial.replace(target)
    finally:
        if writer is not None:
            writer.close()
        partial.unlink(missing_ok=True)
    return count


def check_video(path: Path) -> None:
    """Check that a video can be written, without changing anything.

    Raises:
        ImportError: if imageio is not installed; says what to install.
        ValueError: if the suffix is unknown.
        FileNotFoundError: if the folder does not exist.
    """
    with imports_of("video", "A video"):
        import imageio.v2  # noqa: F401
        import imageio_ffmpeg  # noqa: F401 - imageio looks for it
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(_SUFFIXES)}.")
    require_folder(path)


def _open(path: Path, fps: float) -> Any:
    import imageio.v2 as imageio

    if path.suffix.lower() == ".gif":
        return imageio.get_writer(path, duration=1000 / fps, loop=0)
    # The codec needs even sides, which _even ensures.
    return imageio.get_writer(path, fps=fps, macro_block_size=2)


def _even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Repeat the last row or column if a side would be odd."""
    height, width = frame.shape[:2]
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
