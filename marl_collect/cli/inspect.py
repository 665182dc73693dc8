"""``marl-collect inspect``: what a dataset holds."""

from pathlib import Path
from typing import Annotated

import typer

from marl_collect.cli.consoles import out, user_errors


def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of a dataset.")],
    *,
    keys: Annotated[
        bool, typer.Option("--keys", help="List the keys of its batches too.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw histograms of returns and lengths to this file, such as x.png."
        ),
    ] = None,
) -> None:
    """Show what a dataset holds: task, groups, runs, frames, episodes and returns."""
    from marl_collect.cli.histograms import histogram_table, plot_histograms
    from marl_collect.cli.summary import (
        facts,
        groups_table,
        keys_table,
        readable_bytes,
        returns_table,
    )
    from marl_collect.storage import open_dataset

    with user_errors(OSError, ValueError):
        dataset = open_dataset(path)
        episodes = list(dataset.episodes())
    contents = dataset.contents
    totals = contents.totals
    length = totals.mean_length
    rows = [
        ("task", contents.description.task),
        ("environment", str(dict(contents.description.env_kwargs) or "as it is")),
        ("batches", f"{len(dataset):,}"),
        ("frames", f"{totals.frames:,}"),
        ("size", readable_bytes(totals.nbytes)),
        ("episodes", f"{totals.episodes:,}"),
        ("mean length", "-" if length is None else f"{length:,.1f} frames"),
    ]
    for number, run in enumerate(contents.runs):
        frames = sum(b.frames for b in contents.batches if b.run == number)
        policy = ", ".join(f"{k}={v}" for k, v in run.policy.items()) or "not described"
        rows.append(
            (f"run {number}", f"{frames:,} frames, {run.started}, seed {run.seed}")
        )
        rows.append(("", f"policy: {policy}"))
        versions = ", ".join(f"{k} {v}" for k, v in run.versions.items())
        rows.append(("", f"versions: {versions}"))
    out.print(facts(rows))
    out.print(groups_table(contents.description.environment))
    if keys:
        out.print(keys_table(contents.keys))
    if totals.episodes:
        out.print(returns_table(contents.description.environment, totals))
        returns = [episode.team_return for episode in episodes]
        out.print(histogram_table(returns, "Team returns"))
        lengths = [episode.length for episode in episodes]
        out.print(histogram_table(lengths, "Lengths in frames"))
    if plot is not None:
        with user_errors(ImportError, ValueError, OSError):
            if not totals.episodes:
                raise ValueError("There is nothing to plot: no episode has ended.")
            plot_histograms(episodes, contents.description.task, plot)
        out.print(f"histograms: {plot}", soft_wrap=True, highlight=False)
