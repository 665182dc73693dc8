"""Commands for datasets: ``inspect``, ``copy``, ``merge``, ``compact`` and others."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from marl_collect.cli.arguments import Cache, Compression
from marl_collect.cli.consoles import err, out, user_errors
from marl_collect.cli.tasks import parse_settings
from marl_collect.files.atomic import named_if_full
from marl_collect.storage.formats import FORMATS

_Format = Annotated[
    str,
    typer.Option(
        "--format",
        help=f"Format: {', '.join(f'`{n}`' for n in FORMATS)}; "
        "`minari` is export-only, `vault` import-only.",
    ),
]

if TYPE_CHECKING:
    from marl_collect.storage.index import Index


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
    from marl_collect.cli.histograms import (
        episode_panels,
        histogram_table,
        plot_histograms,
        reward_panels,
    )
    from marl_collect.cli.summary import (
        episodes_table,
        facts,
        groups_table,
        keys_table,
        ranges_table,
    )
    from marl_collect.storage import open_dataset
    from marl_collect.storage.files import size_of

    with user_errors(OSError, ValueError):
        dataset = open_dataset(path, cache=cache)
        episodes = list(dataset.episodes())
        statistics = dataset.statistics
        panels = episode_panels(episodes) if episodes else reward_panels(dataset)
    contents = dataset.contents
    totals = contents.totals
    length = totals.mean_length
    rows = [
        ("task", contents.description.task),
        ("environment", str(dict(contents.description.env_kwargs) or "no arguments")),
        ("batches", f"{len(dataset):,}"),
        ("frames", f"{totals.frames:,}"),
        ("size in memory", decimal(totals.nbytes)),
        ("folder", decimal(size_of(path)) if path.exists() else dataset.name),
        ("episodes", f"{totals.episodes:,}"),
        ("mean length", "-" if length is None else f"{length:,.1f} frames"),
    ]
    rows += _runs(contents)
    out.print(facts(rows))
    environment = contents.description.environment
    out.print(groups_table(environment))
    if keys:
        out.print(keys_table(contents.keys))
    ranges = statistics.ranges if keys else statistics.main_ranges(environment)
    out.print(ranges_table(ranges))
    if totals.episodes:
        out.print(episodes_table(environment, statistics))
        panels_shown = {
            "Team returns": panels[0][1],
            "Lengths in frames": panels[-1][1],
        }
    else:
        panels_shown = dict(panels)
    for title, values in panels_shown.items():
        out.print(histogram_table(values, title))
    if plot is not None:
        with user_errors(ImportError, ValueError, OSError):
            if not panels:
                raise ValueError("Nothing to plot: the dataset has no frames.")
            what = "episodes" if totals.episodes else "frames"
            plot_histograms(panels, contents.description.task, what, plot)
        out.print(f"histograms: {plot}", soft_wrap=True)
    if card is not None:
        with user_errors(OSError), named_if_full(card):
            card.write_text(dataset.card(), encoding="utf-8")
        out.print(f"card: {card}", soft_wrap=True)


def _runs(contents: "Index") -> list[tuple[str, str]]:
    """Return what is printed about the runs of a dataset."""
    rows: list[tuple[str, str]] = []
    for number, run in enumerate(contents.runs):
        frames = contents.run_frames(number)
        policy = ", ".join(f"{k}={v}" for k, v in run.policy.items()) or "not described"
        rows.append(
            (f"run {number}", f"{frames:,} frames, {run.started}, seed {run.seed}")
        )
        rows.append(("", f"policy: {policy}"))
        versions = contents.new_versions(number)
        if versions:
            rows.append(("", f"versions: {versions}"))
    return rows


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

    Only batches missing from the target are copied: run the command again after an
    interruption, or when the dataset has grown. The target is always a complete
    dataset.
    """
    from marl_collect.storage import copy as write

    with user_errors(OSError, ValueError, ImportError):
        settings = parse_settings(option or [], "--option")
        batches = write(source, target, storage_options=settings)
    out.print(f"{batches:,} batches: {target}", soft_wrap=True)


def merge(
    paths: Annotated[list[Path], typer.Argument(help="Folders of datasets.")],
    *,
    out_folder: Annotated[
        Path, typer.Option("--out", help="New or empty folder to write to.")
    ],
) -> None:
    """Merge several datasets into a new one.

    Task, settings, groups, spaces and keys must match. The new folder appears when it
    is complete.
    """
    from marl_collect.storage import merge as write

    with user_errors(OSError, ValueError):
        totals = write(paths, out_folder).contents.totals
    _report(totals.episodes, totals.frames, out_folder)


def compact(
    path: Annotated[Path, typer.Argument(help="Folder of a dataset.")],
    *,
    out_folder: Annotated[
        Path, typer.Option("--out", help="New or empty folder to write to.")
    ],
    compression: Compression = "lz4",
) -> None:
    """Rewrite a dataset with larger batches; also converts earlier formats.

    Frames, episodes and runs stay the same. The new folder appears when it is complete.
    """
    from marl_collect.storage import compact as write

    with user_errors(OSError, ValueError):
        checked: Any = compression  # `compact` checks it.
        totals = write(path, out_folder, compression=checked).contents.totals
    _report(totals.episodes, totals.frames, out_folder)


def label(
    path: Annotated[Path, typer.Argument(help="Folder of a dataset.")],
    *,
    author: Annotated[str | None, typer.Option(help="Author of the dataset.")] = None,
    license: Annotated[  # noqa: A002 - the field's word
        str | None, typer.Option(help="License, such as `CC-BY-4.0`.")
    ] = None,
    description: Annotated[str | None, typer.Option(help="Free text.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Search keyword. Repeatable.")
    ] = None,
) -> None:
    """Set author, license, description and tags, for cards and exports."""
    from marl_collect.storage import label as write

    with user_errors(OSError, ValueError):
        metadata = write(
            path, author=author, license=license, description=description, tags=tag
        )
    for name, value in metadata.to_json().items():
        shown = value if isinstance(value, str) else ", ".join(value)
        out.print(f"{name}: {shown}", soft_wrap=True)


def export(
    path: Annotated[Path, typer.Argument(help="Folder or URL of a dataset.")],
    *,
    target: Annotated[
        str,
        typer.Option(
            "--out", help="New file or folder; for `minari`, the id of the dataset."
        ),
    ],
    file_format: _Format = "hdf5",
    compression: Annotated[
        str | None,
        typer.Option(
            help="Compression of `hdf5` and `minari`: `gzip`, `lzf` or `none`.  "
            "[default: gzip]",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Argument for the format; VALUE is JSON or text. Repeatable.",
        ),
    ] = None,
    cache: Cache = None,
) -> None:
    """Export the complete episodes of a dataset to another format.

    `minari` registers the dataset in Minari's local store, where
    `minari.list_local_datasets()` finds it.

    Example: `marl-collect export data --format hdf5 --out data.hdf5`
    """
    from marl_collect.cli.progress import ProgressDisplay, live
    from marl_collect.storage import export_dataset, open_dataset

    with user_errors(OSError, ValueError, KeyError, ImportError):
        settings: dict[str, Any] = parse_settings(option or [], "--option")
        if compression is not None:
            if "compression" in settings:
                raise ValueError(
                    "--compression and --option compression= are the same: pass one."
                )
            settings["compression"] = compression
        trajectories = open_dataset(path, cache=cache).trajectories
        display = ProgressDisplay(f"export {target}", 0)
        with live(display, err):
            written = export_dataset(
                trajectories, target, file_format, progress=display.convert, **settings
            )
    _report(len(trajectories), int(trajectories.lengths.sum()), written)


def import_(
    source: Annotated[str, typer.Argument(help="File or folder.")],
    *,
    file_format: _Format,
    target: Annotated[Path, typer.Option("--out", help="New folder of the dataset.")],
    compression: Compression = "lz4",
) -> None:
    """Import episodes from another format into a new dataset.

    Example: `marl-collect import data.hdf5 --format hdf5 --out data`
    """
    from marl_collect.cli.progress import ProgressDisplay, live
    from marl_collect.storage import import_dataset

    with user_errors(OSError, ValueError, KeyError, ImportError):
        checked: Any = compression  # `import_dataset` checks it.
        display = ProgressDisplay(f"import {source}", 0)
        with live(display, err):
            dataset = import_dataset(
                source,
                target,
                file_format,
                compression=checked,
                progress=display.convert,
            )
    totals = dataset.contents.totals
    _report(totals.episodes, totals.frames, target)


def _report(episodes: int, frames: int, written: Path) -> None:
    out.print(
        f"{episodes:,} episodes, {frames:,} frames: {written}",
        soft_wrap=True,
    )
