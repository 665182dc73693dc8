"""Pictures of a comparison: learning curves."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_collect.errors import imports_of
from marl_collect.evaluation.intervals import Interval, bootstrap
from marl_collect.files.atomic import named_if_full
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.results import Run, by_setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 6
"""More setups than this are drawn in one panel per algorithm."""
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = "osD^vP"

Baselines = Mapping[str, float]
"""Label to return of the team, such as that of a hand-written policy."""


def plot_curves(
    runs: Sequence[Run],
    title: str,
    path: Path,
    random: EvaluationRecord | None = None,
    baselines: Baselines | None = None,
) -> None:
    """Write ``curves`` to a picture.

    Args:
        runs: as for ``curves``, like ``title``, ``random`` and ``baselines``.
        title: of the picture.
        path: of the picture; its suffix determines the format. A PDF of the same name
            is written beside it.
        random: evaluation of random actions.
        baselines: further lines.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure = curves(runs, title, random, baselines)
    with named_if_full(path):
        figure.savefig(path, dpi=120)
    from matplotlib import rc_context

    pdf = path.with_suffix(".pdf")
    # Publishers refuse fonts of Type 3.
    with rc_context({"pdf.fonttype": 42}), named_if_full(pdf):
        figure.savefig(pdf)


def curves(
    runs: Sequence[Run],
    title: str,
    random: EvaluationRecord | None = None,
    baselines: Baselines | None = None,
) -> "Figure":
    """Draw the returns of evaluations over frames.

    A line is the interquartile mean of a setup's seeds, with a band of the 95 %
    bootstrap interval. Lines that coincide stay visible: each has dashes and markers of
    its own. With many setups there is a panel per algorithm.

    Args:
        runs: runs of one task.
        title: of the picture.
        random: evaluation of random actions, drawn as a labelled line.
        baselines: further labelled lines.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    with imports_of("plot", "A picture"):
        from matplotlib.text import Text
    setups_of_runs = by_setup(runs)
    panels = _panels(setups_of_runs)
    # The same in all pictures of a comparison.
    colours = {name: f"C{k % 10}" for k, name in enumerate(sorted(setups_of_runs))}
    levels = dict(baselines or {})
    if random is not None:
        levels["random actions"] = random.team
    lines = {f"{label} {Interval(value)}": value for label, value in levels.items()}
    figure, grid = _figure(len(panels))
    shown = [value for group in panels.values() for value in _levels(group)]
    low, high = _limits(shown, list(lines.values()))
    for axes, (name, setups) in zip(grid, panels.items(), strict=True):
        for index, (setup, group) in enumerate(setups.items()):
            _draw(axes, group, setup, index, colours[setup])
        for label, value in lines.items():
            axes.axhline(value, color="black", linewidth=0.8)
            axes.annotate(
                label,
                (1, value),
                (-2, 2),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                size=7,
                bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
            )
        axes.set_ylim(low, high)
        _note_outside(axes, setups.values(), low, high)
        # Above the panel, where it covers neither curves nor ticks.
        axes.legend(
            title=name,
            fontsize=7,
            title_fontsize=9,
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
            ncols=2,
            frameon=False,
        )
    figure.suptitle(title)
    label = "frames (steps of one environment)"
    if any(len(group) > 1 for group in setups_of_runs.values()):
        label += "\nlines: interquartile means of seeds; bands: 95 % intervals"
    figure.supxlabel(label, size=9)
    figure.supylabel("return of an episode, summed over agents", size=9)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # A ``$`` in a name begins no formula.
    return figure


def _figure(panels: int) -> tuple["Figure", list[Any]]:
    """Return a figure with panels over frames, at most two in a row, and their axes.

    Raises:
        ImportError: if matplotlib is not installed; says what to install.
    """
    with imports_of("plot", "A picture"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter

    wide = min(2, panels)
    high = -(-panels // wide)
    figure = Figure(
        figsize=(max(6, 4.6 * wide), 3.6 * high + 0.3), layout="constrained"
    )
    grid = list(
        figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False).flat
    )
    for axes in grid[panels:]:
        axes.set_visible(False)
    for axes in grid[:panels]:
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True, labelsize=8)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, grid[:panels]


def _panels(setups: Mapping[str, list[Run]]) -> dict[str, dict[str, list[Run]]]:
    """Return the setups of each panel by its title."""
    if len(setups) <= _MOST_LINES:
        return {"": dict(setups)}
    panels: dict[str, dict[str, list[Run]]] = {}
    for name, group in setups.items():
        panels.setdefault(name.split("-")[0], {})[name] = group
    # Algorithms with one setup, such as value decomposition, share a panel.
    single = [algorithm for algorithm, lines in panels.items() if len(lines) == 1]
    shared = {name: run for one in single for name, run in panels.pop(one).items()}
    return {**panels, ", ".join(single): shared} if single else panels


def _levels(setups: Mapping[str, list[Run]]) -> list[float]:
    """Return the returns of all evaluations but the first, of untrained weights."""
    return [
        record.team
        for group in setups.values()
        for run in group
        for record in run.evaluations[1:] or run.evaluations
    ]


def _note_outside(
    axes: Any, setups: Iterable[Sequence[Run]], low: float, high: float
) -> None:
    """Write which evaluations of untrained weights are outside of the axis."""
    first = [run.evaluations[0].team for s in setups for run in s if run.evaluations]
    notes = []
    if first and max(first) > high:
        notes.append(f"untrained: up to {max(first):.4g}, above")
    if first and min(first) < low:
        notes.append(f"untrained: down to {min(first):.4g}, below")
    place = {"xytext": (3, 3), "textcoords": "offset points", "size": 7}
    axes.annotate("\n".join(notes), (0, 0), xycoords="axes fraction", **place)


def _limits(values: Sequence[float], lines: Sequence[float]) -> tuple[float, float]:
    """Return the range of the vertical axis: that of training, and of the lines."""
    low = min([*values, *lines])
    high = max([*values, *lines])
    margin = 0.08 * (high - low) or 1.0
    return low - margin, high + margin


def _draw(axes: Any, runs: Sequence[Run], setup: str, index: int, colour: str) -> None:
    frames, means, lows, highs = _mean_curve(runs)
    axes.fill_between(frames, lows, highs, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        frames,
        means,
        color=colour,
        # Earlier lines are wider, so that one below another one can be seen.
        linewidth=3.2 - 0.4 * (index % _MOST_LINES),
        linestyle=_DASHES[index % len(_DASHES)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=7 - 0.7 * (index % _MOST_LINES),
        markerfacecolor="none",
        label=f"{setup} ({len(runs)} seeds)" if len(runs) > 1 else setup,
    )


def _mean_curve(
    runs: Sequence[Run],
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return frames at which all seeds were evaluated, means and intervals."""
    values = [{w.frames: w.team for w in run.evaluations} for run in runs]
    frames = sorted(set.intersection(*(set(v) for v in values)))
    means = [bootstrap([[v[at] for v in values]], repetitions=500) for at in frames]
    return (
        frames,
        [mean.value for mean in means],
        [mean.low for mean in means],
        [mean.high for mean in means],
    )
