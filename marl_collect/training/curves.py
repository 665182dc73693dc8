"""Learning curves as a picture: each seed thin, their interquartile mean thick."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.intervals import interquartile_mean
from marl_collect.training.results import Run


def plot_curves(
    runs: Sequence[Run], title: str, path: Path, random: EvaluationRecord | None = None
) -> None:
    """Draw returns of evaluations over frames, one colour per setup.

    Args:
        runs: of one task.
        title: of the picture.
        path: where to write it; the ending chooses the format.
        random: random actions, drawn as a dashed line.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    by_setup: dict[str, list[Run]] = {}
    for run in runs:
        by_setup.setdefault(run.setup, []).append(run)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    colours = mpl.colormaps["tab20" if len(by_setup) > 10 else "tab10"]
    for index, (setup, group) in enumerate(by_setup.items()):
        colour = colours(index)
        for run in group:
            axes.plot(
                [w.frames for w in run.evaluations],
                [w.team for w in run.evaluations],
                color=colour,
                alpha=0.35,
                linewidth=0.8,
            )
        frames, means = _mean_curve(group)
        axes.plot(frames, means, color=colour, linewidth=2, label=setup)
    if random is not None:
        axes.axhline(random.team, color="grey", linestyle="--", label="random")
    axes.set_title(title)
    axes.set_xlabel("frames (steps of one environment)")
    axes.set_ylabel("return of an episode, summed over agents")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def _mean_curve(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Return the mean over seeds where all of them were evaluated."""
    values = [{w.frames: w.team for w in run.evaluations} for run in runs]
    frames = sorted(set.intersection(*(set(v) for v in values)))
    return frames, [
        float(interquartile_mean(np.array([v[at] for v in values]))) for at in frames
    ]
