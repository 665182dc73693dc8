"""Commands for datasets: ``inspect``, ``copy``, ``export`` and ``import``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from marl_collect.cli.arguments import Cache
from marl_collect.cli.consoles import err, out, user_errors
from marl_collect.cli.tasks import parse_settings
from marl_collect.core.description import FLAGS
from marl_collect.files.atomic import named_if_full


def inspect(
    path: Annotated[Path, typer.Argument(help="Folder or URL of a dataset.")],
    *,
    keys: Annotated[
        bool, typer.Option("--keys", help="Also list the batch keys.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write histograms of returns and lengths to this file, such as x.png."
        ),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(
            help="Write a Markdown description of the dataset to this file, such as "
            "README.md."
        ),
    ] = None,
    cache: Cache = None,
) -> None:
    """Print a summary of a dataset: task, runs, episodes, returns, value ranges.

    If no episode is complete, histograms show rewards per frame.
    """
    from marl_collect.cli import histograms, summary
    from marl_collect.storage import open_dataset
    from marl_collect.storage.card import card_tables

    with user_errors(OSError, ValueError):
        dataset = open_dataset(path, cache=cache)
        frames, episodes = dataset.transitions, dataset.trajectories
        panels = (
            histograms.episode_panels(episodes)
            if len(episodes)
            else histograms.reward_panels(dataset)
        )
    description = dataset.description
    size = sum(file.path.stat().st_size for file in dataset.files)
    rows = [
        ("task", description.task),
        ("environment", str(dict(description.env_kwargs) or "no arguments")),
        ("frames", f"{len(frames):,}"),
        ("size in memory", decimal(frames.nbytes)),
        ("files", f"{len(dataset.files):,} with {decimal(size)}"),
        ("episodes", f"{len(episodes):,}"),
        (
            "mean length",
            f"{episodes.lengths.mean():,.1f} frames" if len(episodes) else "-",
        ),
    ]
    out.print(summary.facts(rows))
    environment = description.environment
    if not keys:  # Only what the environment reads and writes.
        usual = summary.environment_keys(environment)
        names = (column.key for column in frames.keys)
        chosen = (key for key in names if key in usual and key[-1] not in FLAGS)
        frames = frames.select(*chosen)
    for table in card_tables(frames, episodes):
        out.print(summary.table_of(table))
    if len(episodes):
        panels_shown = {
            "Team returns": panels[0][1],
            "Lengths in frames": panels[-1][1],
        }
    else:
        panels_shown = dict(panels)
    for title, values in panels_shown.items():
        out.print(histograms.histogram_table(values, title))
    if plot is not None:
        with user_errors(ImportError, ValueError, OSError):
            if not panels:
                raise ValueError("Nothing to plot: the dataset has no finite rewards.")
            what = "episodes" if len(episodes) else "frames"
            histograms.plot_histograms(panels, description.task, what, plot)
        out.print(f"histograms: {plot}", soft_wrap=True)
    if card is not None:
        with user_errors(OSError), named_if_full(card):
            card.write_text(dataset.card(), encoding="utf-8")
        out.print(f"card: {card}", soft_wrap=True)


def copy(
    source: Annotated[str, typer.Argument(help="Folder of a dataset, or a URL.")],
    target: Annotated[
        str, typer.Argument(help="Folder or URL, such as `s3://bucket/data`.")
    ],
    *,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Argument for the object store, such as `endpoint_url`; VALUE is JSON "
            "or text. Repeatable.",
        ),
    ] = None,
) -> None:
    """Copy a dataset to or from an object store, or to another folder.

    Only files missing from the target are copied: run the command again after an
    interruption, or when the dataset has grown. The target is always a complete
    dataset.
    """
    from marl_collect.storage import copy as write

    with user_errors(OSError, ValueError, ImportError):
        settings = parse_settings(option or [], "--option")
        count = write(source, target, **settings)
    out.print(f"{count:,} files: {target}", soft_wrap=True)


def export(
    path: Annotated[Path, typer.Argument(help="Folder or URL of a dataset.")],
    *,
    target: Annotated[
        str, typer.Option("--out", help="Id of the new dataset, such as `spread-v0`.")
    ],
    file_format: Annotated[
        str, typer.Option("--format", help="Format: `minari`.")
    ] = "minari",
    cache: Cache = None,
) -> None:
    """Export the complete episodes of a dataset to Minari's local store.

    `minari.list_local_datasets()` lists it.

    Example: `marl-collect export data --format minari --out mine/spread-v0`
    """
    from marl_collect.cli.progress import ProgressDisplay, live
    from marl_collect.storage import export_minari, open_dataset

    with user_errors(OSError, ValueError, KeyError, ImportError):
        _check_format(file_format, "minari", "export")
        trajectories = open_dataset(path, cache=cache).trajectories
        display = ProgressDisplay(f"export {target}", 0)
        with live(display, err):
            written = export_minari(trajectories, target, progress=display.convert)
    _report(len(trajectories), int(trajectories.lengths.sum()), written)


def import_(
    source: Annotated[Path, typer.Argument(help="Folder of a vault.")],
    *,
    target: Annotated[Path, typer.Option("--out", help="New folder of the dataset.")],
    file_format: Annotated[
        str, typer.Option("--format", help="Format: `vault`.")
    ] = "vault",
) -> None:
    """Import the episodes of a flashbax vault into a new dataset.

    Example: `marl-collect import vaults/2s3z.vlt/Good --format vault --out data`
    """
    from marl_collect.cli.progress import ProgressDisplay, live
    from marl_collect.storage import import_vault

    with user_errors(OSError, ValueError, ImportError):
        _check_format(file_format, "vault", "import")
        display = ProgressDisplay(f"import {source}", 0)
        with live(display, err):
            dataset = import_vault(source, target, progress=display.convert)
    _report(len(dataset.trajectories), len(dataset), target)


def _check_format(name: str, expected: str, what: str) -> None:
    if name != expected:
        raise ValueError(f"{name!r} is not a format of {what}: use {expected}.")


def _report(episodes: int, frames: int, written: Path) -> None:
    text = f"{episodes:,} episodes, {frames:,} frames: {written}"
    out.print(text, soft_wrap=True)
