"""Histograms of episodes, as text for the terminal and as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from marl_collect.errors import imports_of
from marl_collect.files.atomic import named_if_full, require_folder
from marl_collect.programs.printable import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from marl_collect.storage import Dataset, Trajectories

_BINS = 10
_WIDTH = 40
_MOST_BINS = 30


def histogram_table(values: Sequence[float], title: str) -> Table:
    """Return a table with one row per bin: its range, a bar and its count.

    Args:
        values: at least one.
        title: of the table.
    """
    bins = min(_BINS, len(set(values)))
    edges = np.linspace(min(values), max(values), bins + 1)
    counts, _ = np.histogram(values, edges)
    table = Table(title=title, box=None, show_header=False)
    table.add_column(justify="right", style="cyan")
    table.add_column(no_wrap=True, style="green")
    table.add_column(justify="right")
    highest = max(counts)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(_WIDTH * count / highest) or ("▏" if count else "")
        table.add_row(f"{low:,.4g} to {high:,.4g}", bar, f"{count:,}")
    return table


Panel = tuple[str, Sequence[float]]
"""The name of a histogram, and its values."""


def episode_panels(episodes: "Trajectories") -> list[Panel]:
    """Return team returns, returns per group, and lengths of at least one episode."""
    panels: list[Panel] = [("team return", episodes.returns.tolist())]
    returns = episodes.agent_returns
    if len(returns) > 1:
        panels += [
            (f"return of {group}", values.sum(1).tolist())
            for group, values in returns.items()
        ]
    return [*panels, ("length in frames", episodes.lengths.astype(float).tolist())]


def reward_panels(dataset: "Dataset") -> list[Panel]:
    """Return the finite rewards of frames, summed over each group."""
    keys = {field.key for field in dataset.transitions.keys}
    panels: list[Panel] = []
    for name in dataset.description.environment.groups:
        key = ("next", name, "reward")
        if key in keys:
            rewards = dataset.transitions.select(key)[:][key].sum((1, 2))
            finite = rewards[rewards.isfinite()].tolist()
            panels.append((f"Reward of {name} in a frame", finite))
    return [panel for panel in panels if len(panel[1])]


def plot_histograms(panels: Sequence[Panel], title: str, what: str, path: Path) -> None:
    """Write histograms to a picture.

    Args:
        panels: at least one.
        title: of the picture.
        what: the values are of, such as ``"episodes"``.
        path: of the picture; its suffix, such as ``.png``, is the format.

    Raises:
        FileNotFoundError: if the folder of the picture does not exist.
        ImportError: if matplotlib is not installed; says what to install.
        ValueError: if matplotlib does not support the suffix.
    """
    require_folder(path)
    with imports_of("plot", "Plotting"):
        from matplotlib import rc_context
    # Publishers refuse fonts of Type 3. A ``$`` in a name begins no formula.
    with (
        rc_context({"pdf.fonttype": 42, "text.parse_math": False}),
        named_if_full(path),
    ):
        _figure(panels, printable(title), what).savefig(path, dpi=120)


def _figure(panels: Sequence[Panel], title: str, what: str) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(panels) // 3)
    columns = -(-len(panels) // rows)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # Draws into memory, without a display or global state.
    figure.suptitle(f"{title}: {len(panels[0][1]):,} {what}")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, values) in zip(grid, panels, strict=False):
        edges = _plot_edges(values)
        axes.hist(values, edges, edgecolor="white", linewidth=0.6)
        axes.axvline(float(np.mean(values)), color="black", linestyle="--")
        axes.set_xlabel(f"{name} (dashed: mean {np.mean(values):,.4g})")
        axes.set_ylabel(what)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        if min(values) == max(values):  # One bar, with room beside it.
            axes.set_xticks([values[0]])
            axes.set_xlim(*(values[0] + 3 * (edge - values[0]) for edge in edges))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def _plot_edges(values: Sequence[float]) -> list[float]:
    """Return the edges of bins that suit the number and the spread of the values.

    Equal values get one bar. Integers get bins of whole numbers. There are at most 30.
    """
    low, high = float(min(values)), float(max(values))
    if low == high:
        half = max(0.5, abs(low) * 0.02)
        return [low - half, low + half]
    count = len(np.histogram_bin_edges(values, "auto")) - 1
    count = min(max(count, 2), _MOST_BINS)
    if all(float(value).is_integer() for value in values):
        width = max(1, math.ceil((high - low + 1) / count))
        return np.arange(low - 0.5, high + width, width).tolist()
    return np.linspace(low, high, count + 1).tolist()
