"""Takes one picture of an environment."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.env_wrapper import EnvWrapper

Picture = NDArray[np.uint8]
"""``[height, width, 3]``."""

SingleEnv = MultiAgentEnv | EnvWrapper

_VISIBLE = 240
"""Minimum pixels of the shorter side; the worlds of MeltingPot have fewer."""


def visible(picture: Picture) -> Picture:
    """Return a picture that is enlarged by an integer factor if it is small."""
    return enlarge(picture, max(1, round(_VISIBLE / min(picture.shape[:2]))))


def enlarge(picture: Picture, factor: int) -> Picture:
    """Repeat every pixel ``factor`` times in both directions."""
    return np.repeat(np.repeat(picture, factor, 0), factor, 1)


def take(env: SingleEnv) -> Picture:
    """Return a copy of the environment's current picture.

    Images of integers in [0, 255] are accepted: ``[height, width]`` is shown in grey,
    and of ``[height, width, 4]`` the alpha channel is left out.

    Raises:
        ValueError: if the environment renders nothing, or no such image; says what to
            do.
    """
    image = env.render()
    if image is None:
        raise ValueError(
            f"{env.description.name} renders no picture. Build PettingZoo's "
            "environments with render_mode='rgb_array'; `marl-collect render` and "
            "`view` pass it to a factory that takes it. An environment of your own "
            "must return an image from render()."
        )
    pixels = np.asarray(image)
    fits = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in (3, 4))
    whole = pixels.dtype.kind in "iu" and pixels.size
    if not fits or not whole or pixels.min() < 0 or pixels.max() > 255:
        raise ValueError(
            f"{env.description.name}: render() must return a uint8 array [height, "
            "width, 3], or integers from 0 to 255, but returned "
            f"{list(pixels.shape)} of {pixels.dtype}."
        )
    colours = pixels[..., None] if pixels.ndim == 2 else pixels[..., :3]
    return np.array(np.broadcast_to(colours, (*pixels.shape[:2], 3)), np.uint8)


def to_picture(pixels: Any) -> Picture:
    """Return a stored image as ``[height, width, 3]``.

    Args:
        pixels: uint8 ``[height, width, channels]`` or ``[channels, height, width]``; of
            other numbers of channels than 3, the first one is shown in grey.
    """
    image = np.asarray(pixels)
    if image.shape[-1] > 4 and image.shape[0] <= 4:  # RGB and alpha
        image = image.transpose(1, 2, 0)
    colours = image[..., :3] if image.shape[-1] in (3, 4) else image[..., :1]
    return np.ascontiguousarray(np.broadcast_to(colours, (*image.shape[:2], 3)))


def to_png(picture: Picture) -> bytes:
    """Return a picture as a PNG file, without a library of images."""
    height, width, _ = picture.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # Each begins with "no filter".
    rows[:, 1:] = picture.reshape(height, -1)
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    chunks = [
        (b"IHDR", size + bytes([8, 2, 0, 0, 0])),  # 8 bits, RGB
        (b"IDAT", zlib.compress(rows.tobytes(), 6)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big")
        + kind
        + data
        + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in chunks
    )


def require_single(env: Any) -> SingleEnv:
    """Check that a factory built one environment.

    Raises:
        TypeError: if it is something else.
    """
    if isinstance(env, (MultiAgentEnv, EnvWrapper)) and not env.batch_size:
        return env
    raise TypeError(
        "A factory for pictures must build one environment, but built "
        f"{type(env).__name__}."
    )
