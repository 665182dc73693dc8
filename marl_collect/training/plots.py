"""Pictures of a comparison: learning curves, final scores, and sample efficiency."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_collect.evaluation.intervals import bootstrap
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.results import BEST_WEIGHTS, TEAM, Run, by_setup, summarize

_MOST_LINES = 6
"""More setups than this are drawn in one panel per algorithm."""
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = "osD^vP"
_EFFICIENT = 0.9
"""Share of the way from random actions to the best setup that counts as learnt."""

Baselines = Mapping[str, float]
"""Label to return of the team, such as that of a hand-written policy."""


def plot_curves(
    runs: Sequence[Run],
    title: str,
    path: Path,
    random: EvaluationRecord | None = None,
    baselines: Baselines | None = None,
) -> None:
    """Write a picture of the returns of evaluations over frames.

    A line is the interquartile mean of a setup's seeds, with a band of the 95 %
    bootstrap interval. Lines that coincide stay visible: each has dashes and markers of
    its own. With many setups there is a panel per algorithm.

    Args:
        runs: runs of one task.
        title: of the picture.
        path: of the picture; its suffix determines the format. A PDF of the same name
            is written beside it.
        random: evaluation of random actions, drawn as a labelled line.
        baselines: further labelled lines.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    setups_of_runs = by_setup(runs)
    panels, colours = _panels(setups_of_runs), _colours(setups_of_runs)
    lines = _lines(random, baselines)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(max(6, 4.6 * columns), 3.6 * rows + 0.3), layout="constrained"
    )
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    shown = [value for group in panels.values() for value in _levels(group)]
    low, high = _limits(shown, list(lines.values()))
    for axes, (name, setups) in zip(grid.flat, panels.items(), strict=False):
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
        axes.set_title(name, size=10)
        axes.set_ylim(low, high)
        axes.grid(alpha=0.3)
        # Below the panel, where it covers no curve.
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
        axes.tick_params(labelbottom=True, labelsize=8)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    figure.supxlabel("frames (steps of one environment)", size=9)
    figure.supylabel("return of an episode, summed over agents", size=9)
    _save(figure, path)


def plot_scores(
    runs: Sequence[Run], title: str, path: Path, random: EvaluationRecord | None = None
) -> None:
    """Write a picture of final scores with intervals, and of sample efficiency.

    On the left are the returns of the best weights on new episodes: interquartile
    means with 95 % bootstrap intervals. On the right are the frames after which the
    mean over seeds first covers 90 % of the way from random actions to the best setup.

    Args:
        runs: runs of one task, of which some are finished.
        title: of the picture.
        path: of the picture; its suffix determines the format. A PDF of the same name
            is written beside it.
        random: evaluation of random actions; without it, the lowest evaluation is used.
    """
    from matplotlib.figure import Figure

    setups = by_setup([run for run in runs if run.best is not None])
    scores = {s.setup: s.returns[TEAM, BEST_WEIGHTS] for s in summarize(runs)}
    order = sorted(scores, key=lambda name: scores[name].value, reverse=True)
    figure = Figure(figsize=(9, 1.4 + 0.32 * len(order)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = _colours(by_setup(runs))
    for row, name in enumerate(order):
        score = scores[name]
        left.barh(
            row,
            score.high - score.low,
            left=score.low,
            height=0.6,
            alpha=0.4,
            color=colours[name],
        )
        left.plot([score.value] * 2, [row - 0.3, row + 0.3], color="black")
    left.margins(x=0.1)
    left.set_yticks(range(len(order)), order, size=8)
    left.invert_yaxis()
    left.set_xlabel("return of the team, best weights (95 % interval)", size=8)
    start = random.team if random is not None else min(_levels(setups), default=0.0)
    if random is not None:
        left.axvline(random.team, color="grey", linestyle="--")
        left.set_title(f"dashed: random actions, {random.team:.1f}", size=8)
    curves = {name: _mean_curve(group)[:2] for name, group in setups.items()}
    best = max((max(means) for _, means in curves.values() if means), default=start)
    goal = start + _EFFICIENT * (best - start)
    for row, name in enumerate(order):
        points = zip(*curves[name], strict=True)
        reached = next((frames for frames, mean in points if mean >= goal), None)
        if reached is None:
            right.text(0, row, " not reached", va="center", size=7, color="grey")
        else:
            right.barh(row, reached, height=0.6, color=colours[name])
            right.text(reached, row, f" {reached:,}", va="center", size=7)
    right.set_xlabel(f"frames until {goal:.1f}", size=8)
    right.margins(x=0.2)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
        axes.tick_params(axis="x", labelsize=7)
    figure.suptitle(title, size=11)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Write a picture, and a PDF beside it for a paper."""
    figure.savefig(path, dpi=120)
    figure.savefig(path.with_suffix(".pdf"))


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


def _lines(
    random: EvaluationRecord | None, baselines: Baselines | None
) -> dict[str, float]:
    lines = dict(baselines or {})
    if random is not None:
        lines["random actions"] = random.team
    return {f"{label} {value:.1f}": value for label, value in lines.items()}


def _levels(setups: Mapping[str, list[Run]]) -> list[float]:
    """Return the returns of all evaluations but the first, of untrained weights."""
    return [
        record.team
        for group in setups.values()
        for run in group
        for record in run.evaluations[1:] or run.evaluations
    ]


def _limits(values: Sequence[float], lines: Sequence[float]) -> tuple[float, float]:
    """Return the range of the vertical axis: that of training, and of the lines."""
    low = min([*values, *lines])
    high = max([*values, *lines])
    margin = 0.08 * (high - low) or 1.0
    return low - margin, high + margin


def _colours(setups: Mapping[str, list[Run]]) -> dict[str, str]:
    """Return the colour of each setup, the same in all pictures of a comparison."""
    return {name: f"C{index % 10}" for index, name in enumerate(sorted(setups))}


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
