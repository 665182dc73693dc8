"""``marl-collect export``: a dataset's episodes for other tools."""

from pathlib import Path
from typing import Annotated

import typer

from marl_collect.cli.consoles import out, user_errors


def export(
    path: Annotated[Path, typer.Argument(help="Folder of a dataset.")],
    target: Annotated[Path, typer.Argument(help="Folder to write to, new or empty.")],
    *,
    compression: Annotated[
        str, typer.Option(help="`gzip`, `lzf`, or `none`, as h5py knows them.")
    ] = "gzip",
) -> None:
    """Write the complete episodes to HDF5, in the layout that Minari reads.

    The folder holds `main_data.hdf5` and `metadata.json`; in Python
    `minari.MinariDataset(folder)` opens it, and h5py the file alone.
    """
    from marl_collect.storage import export_hdf5, open_dataset

    if compression not in ("gzip", "lzf", "none"):
        raise typer.BadParameter("expected gzip, lzf or none", param_hint="compression")
    chosen = None if compression == "none" else compression
    with user_errors(OSError, ValueError, KeyError, ImportError):
        trajectories = open_dataset(path).trajectories
        file = export_hdf5(trajectories, target, compression=chosen)
    episodes, frames = len(trajectories), int(trajectories.lengths.sum())
    out.print(
        f"{episodes:,} episodes, {frames:,} frames: {file}",
        soft_wrap=True,
        highlight=False,
    )
