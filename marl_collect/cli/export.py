"""``marl-collect export``: a dataset's episodes for other tools."""

from pathlib import Path
from typing import Annotated, Any

import typer

from marl_collect.cli.consoles import out, user_errors
from marl_collect.cli.tasks import parse_settings


def export(
    path: Annotated[Path, typer.Argument(help="Folder of a dataset.")],
    target: Annotated[Path, typer.Argument(help="Folder to write to, new or empty.")],
    *,
    file_format: Annotated[
        str, typer.Option("--format", help="Format of the files: `hdf5`.")
    ] = "hdf5",
    compression: Annotated[
        str | None,
        typer.Option(
            help="Compression of HDF5: `gzip`, `lzf` or `none`.  [default: gzip]",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Setting of the format; VALUE is JSON or text. Repeatable.",
        ),
    ] = None,
) -> None:
    """Write the complete episodes of a dataset in another format.

    `hdf5` writes `main_data.hdf5` and `metadata.json` in the layout that Minari reads:
    open the folder with `minari.MinariDataset(folder)`, or the file with h5py.
    """
    from marl_collect.storage import open_dataset
    from marl_collect.storage.export_formats import export as write

    with user_errors(OSError, ValueError, KeyError, ImportError):
        settings: dict[str, Any] = parse_settings(option or [], "--option")
        if compression is not None:
            settings["compression"] = compression
        trajectories = open_dataset(path).trajectories
        file = write(trajectories, target, file_format, **settings)
    episodes, frames = len(trajectories), int(trajectories.lengths.sum())
    out.print(
        f"{episodes:,} episodes, {frames:,} frames: {file}",
        soft_wrap=True,
        highlight=False,
    )
