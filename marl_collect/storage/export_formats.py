"""The formats that ``marl-collect export`` writes.

To add a format, write an exporter in a file of its own and add an entry to ``FORMATS``.
An exporter is a function ``(source, path, **settings) -> Path``: it writes the complete
episodes of ``source`` into the folder ``path`` and returns the file that it wrote.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from marl_collect.storage.dataset import Dataset
from marl_collect.storage.selection import Trajectories

Exporter = Callable[..., Path]


@final
@dataclass(frozen=True)
class ExportFormat:
    """A format that episodes can be exported to.

    Attributes:
        summary: the output, in a few words.
        exporter: the function as ``"module:name"``, imported when it is first used.
    """

    summary: str
    exporter: str

    def load(self) -> Exporter:
        """Import the exporter."""
        module, _, name = self.exporter.partition(":")
        exporter: Exporter = getattr(importlib.import_module(module), name)
        return exporter


FORMATS: dict[str, ExportFormat] = {
    "hdf5": ExportFormat(
        "HDF5 in the layout that Minari reads",
        "marl_collect.storage.hdf5:export_hdf5",
    ),
    "minari": ExportFormat(
        "a dataset in Minari's local store; the target is its id, as mine/spread-v0",
        "marl_collect.storage.minari_store:export_minari",
    ),
}
"""The formats by name."""


def export(
    source: Dataset | Trajectories,
    path: str | Path,
    format: str = "hdf5",  # noqa: A002 - as in the command line
    **settings: Any,
) -> Path:
    """Write the complete episodes of a dataset in another format.

    Args:
        source: a dataset, or a selection of its episodes.
        path: a folder that does not exist or is empty; an id for ``"minari"``.
        format: name of a format in ``FORMATS``.
        settings: keyword arguments of the format's exporter.

    Returns:
        The file.

    Raises:
        ValueError: if the format is unknown, or has no such setting.
    """
    if format not in FORMATS:
        raise ValueError(
            f"{format!r} is not an export format: use one of {', '.join(FORMATS)}."
        )
    exporter = FORMATS[format].load()
    known = list(inspect.signature(exporter).parameters)[2:]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"The format {format} has no setting {name!r}: use "
                f"{', '.join(known) or 'none'}."
            )
    return exporter(source, path, **settings)
