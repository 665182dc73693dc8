"""Histograms of episodes, as text for the terminal and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from marl_collect.storage.episodes import EndedEpisode

_BINS = 10
_WIDTH = 40


def histogram_table(values: Sequence[float], title: str, *, bins: int = _BINS) -> Table:
    """Return a table with one row per bin: its range, a bar and its count.

    Args:
        values: at least one.
        title: of the table.
        bins: number of bins; one if all values are equal.
    """
    counts, edges = np.histogram(values, _edges(values, bins))
    table = Table(title=title, box=None, show_header=False)
    table.add_column(justify="right", style="cyan")
    table.add_column(no_wrap=True, style="green")
    table.add_column(justify="right")
    highest = max(counts)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(_WIDTH * count / highest) or ("▏" if count else "")
        table.add_row(f"{low:,.4g} to {high:,.4g}", bar, f"{count:,}")
    return table


def plot_histograms(episodes: Sequence[EndedEpisode], title: str, path: Path) -> None:
    """Write histograms of team returns, returns per group, and lengths to a picture.

    Args:
        episodes: at least one.
        title: of the picture.
        path: of the picture; its suffix, such as ``.png``, is the format.

    Raises:
        ImportError: if matplotlib is not installed; says what to install.
        ValueError: if matplotlib does not support the suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Plotting needs matplotlib, which is not installed: "
            'pip install "marl-collect[plot]"'
        ) from error
    groups = list(episodes[0].returns)
    panels = [("team return", [e.team_return for e in episodes])]
    if len(groups) > 1:
        panels += [
            (f"return of {g}", [sum(e.returns[g]) for e in episodes]) for g in groups
        ]
    panels.append(("length in frames", [float(e.length) for e in episodes]))
    figure = Figure(figsize=(4 * len(panels), 3), layout="constrained")
    FigureCanvasAgg(figure)  # Draws into memory, without a display or global state.
    figure.suptitle(f"{title}: {len(episodes):,} episodes")
    for axes, (name, values) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        axes.hist(values, _edges(values, 30))
        axes.axvline(float(np.mean(values)), color="black", linestyle="--")
        axes.set_xlabel(f"{name} (mean {np.mean(values):,.4g})")
        axes.set_ylabel("episodes")
    figure.savefig(path, dpi=120)


def _edges(values: Sequence[float], bins: int) -> list[float]:
    low, high = float(min(values)), float(max(values))
    if low == high:
        return [low, high]
    return np.linspace(low, high, bins + 1).tolist()
