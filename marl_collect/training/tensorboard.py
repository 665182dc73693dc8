"""Figures for TensorBoard, where something that writes them is installed."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final


@final
class EventWriter:
    """Writes scalars into an events file; nothing without the library.

    Args:
        path: folder for the file.
    """

    def __init__(self, path: Path) -> None:
        self._writer: Any = None
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(path))

    def add(self, figures: Mapping[str, float], frames: int) -> None:
        """Write figures; those that are not finite are left out."""
        if self._writer is not None:
            for name, value in figures.items():
                if name != "frames" and math.isfinite(value):
                    self._writer.add_scalar(name, value, frames)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
