"""Writes episode, step and returns above a picture, and cuts unused margins."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_collect.errors import imports_of
from marl_collect.rendering.pictures import Picture, visible

_SHOWN = 4
"""Groups with more agents than this show their sum only."""
_WIDTH_PER_SIZE = 34
"""The font is this fraction of the picture's width, so that a line fits."""
_SMALLEST = 10


def write_above(picture: Picture, lines: Sequence[str]) -> Picture:
    """Return the picture, enlarged if small, below a band with the lines.

    Raises:
        ImportError: if pillow is not installed; says what to install.
    """
    with imports_of("video", "Text in pictures"):
        from PIL import Image, ImageDraw, ImageFont

    large = visible(picture)
    width = large.shape[1]
    size = max(_SMALLEST, width // _WIDTH_PER_SIZE)
    height = round(size * 1.4) * len(lines) + size // 2
    band = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(band)
    font = ImageFont.load_default(size)
    for number, line in enumerate(lines):
        corner = (size // 2, round(size * (0.2 + 1.4 * number)))
        draw.text(corner, _cut(line, font, width - size), fill="black", font=font)
    stacked: NDArray[np.uint8] = np.concatenate([np.asarray(band), large])
    return stacked


def caption(
    episode: int,
    step: int,
    returns: Mapping[str, NDArray[Any]],
    agents: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the lines of a picture: episode and step, then one line per group."""
    total = sum(float(values.sum()) for values in returns.values())
    lines = [f"episode {episode}   step {step}   team return: {total:.1f}"]
    for name, values in returns.items():
        if values.size > _SHOWN:
            lines.append(f"{name} ({values.size} agents): {values.sum():.1f}")
        else:
            pairs = zip(agents[name], values.flat, strict=True)
            lines.append("   ".join(f"{agent}: {value:.1f}" for agent, value in pairs))
    return lines


def used_part(picture: Picture) -> tuple[slice, slice]:
    """Return the rows and columns of a picture without black ones at its edges."""
    return _used(picture, 0), _used(picture, 1)


def _used(picture: Picture, axis: int) -> slice:
    """Return the rows (axis 0) or columns (axis 1) from the first used to the last."""
    used = np.unique(np.nonzero(picture)[axis])
    return slice(int(used[0]), int(used[-1]) + 1) if used.size else slice(None)


def _cut(line: str, font: Any, width: float) -> str:
    """Return as much of the line as fits."""
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "...") > width:
        line = line[:-1]
    return line + "..."
