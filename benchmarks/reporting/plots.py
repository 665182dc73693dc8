"""The report's plots."""

from collections.abc import Callable, Iterator
from typing import Any

from experiments import scaling
from experiments.figures import PROCESSES
from experiments.headline import DIRECT, OURS, STOCK, STORED
from harness.estimates import Estimate
from matplotlib.figure import Figure

from reporting.reading import MissingError, Reading

_PREDICTED_CORES = (2, 4, 8, 16, 32, 64)


def plots(reading: Reading) -> Iterator[tuple[str, str, Figure]]:
    """Yield name, title and figure of every plot that the run has figures for."""
    for title, draw in _PLOTS.items():
        figure = draw(reading)
        if figure is not None:
            yield draw.__name__, title, figure


def rates(reading: Reading) -> Figure | None:
    """Draw frames per second of ours, TorchRL and the limits, relative to stock."""
    names = reading.names("headline/")
    if not names:
        return None
    figure = Figure((9, 1.1 + 1.05 * len(names)), layout="constrained")
    axes = figure.subplots()
    ticks, titles = [], []
    row = 0.0
    colours = {OURS: "C0", STOCK: "C7", DIRECT: "C2", STORED: "C8"}
    for name in names:
        first = row
        for label in reading.labels(name):
            try:
                ratio = reading.ratio(name, label, STOCK)
            except MissingError:
                continue
            colour = colours.get(label, "C0" if label.startswith("ours") else "C1")
            axes.barh(row, ratio.median, color=colour, xerr=_error(ratio), ecolor="k")
            axes.text(
                ratio.high, row, f"  {label}: {ratio.median:.2f}", va="center", size=7
            )
            row += 1
        ticks.append((first + row - 1) / 2)
        titles.append(name.removeprefix("headline/").replace("/", ",\n"))
        row += 1
    axes.set_yticks(ticks, titles, size=8)
    axes.invert_yaxis()
    axes.set_xlabel("frames/s, relative to stock loops (95 % interval)")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.25)
    axes.axvline(1, color="k", lw=0.7)
    return figure


def curves(reading: Reading) -> Figure | None:
    """Draw what sleeping workers reach of the ideal."""
    kinds = [k for k in ("constant", "lognormal") if reading.names(f"scaling/{k}/")]
    if not kinds:
        return None
    figure = Figure((9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        names = reading.names(f"scaling/{kind}/")
        for label in _SCALING_LABELS:
            points = sorted(_of_ideal(reading, names, label))
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.set_title(f"{kind} pauses", size=9)
        axes.set_xlabel("workers")
        axes.set_ylim(0, 1.1)
        axes.axhline(1, color="k", lw=0.7)
    panels[0].set_ylabel("of ideal")
    panels[-1].legend(fontsize=7)
    return figure


def parent(reading: Reading) -> Figure | None:
    """Draw the trainer's cost per step, and what it predicts for more cores."""
    costs = parent_costs(reading)
    if len(costs) < 2:
        return None
    figure = Figure((9, 3.4), layout="constrained")
    cost_axes, core_axes = figure.subplots(1, 2)
    counts = sorted(costs)
    cost_axes.plot(counts, [costs[n] * n for n in counts], "o-")
    cost_axes.set_xlabel("processes")
    cost_axes.set_ylabel("trainer, us per step of all")
    for microseconds in (200, 1000):
        cores = list(_PREDICTED_CORES)
        shares = [predicted(reading, microseconds, n) for n in cores]
        core_axes.plot(cores, shares, "o--", label=f"steps of {microseconds} us")
    core_axes.set_xscale("log", base=2)
    core_axes.set_ylim(0, 1.1)
    core_axes.set_xlabel("cores and processes")
    core_axes.set_title("PREDICTION from the trainer's cost", size=9)
    core_axes.set_ylabel("share of ideal")
    core_axes.legend(fontsize=7)
    return figure


def parent_costs(reading: Reading) -> dict[int, float]:
    """Return the trainer's microseconds per worker-step, by processes."""
    costs = {}
    for count in PROCESSES:
        try:
            estimate = reading.estimate("figures/parent_cost", str(count), "parent_us")
        except MissingError:
            continue
        costs[count] = estimate.median
    return costs


def predicted(reading: Reading, microseconds: float, processes: int) -> float:
    """Return the predicted share of ideal speed: t / max(t, p0 + p1 n).

    ``p0 + p1 n`` is the trainer's time per step of all processes, a straight line
    through what was measured.
    """
    import numpy as np

    costs = parent_costs(reading)
    counts = sorted(costs)
    slope, constant = np.polyfit(counts, [costs[n] * n for n in counts], 1)
    return float(
        microseconds / max(microseconds, max(0.0, constant) + slope * processes)
    )


def puffer(reading: Reading) -> Figure | None:
    """Draw ours and PufferLib, by workers."""
    names = reading.names("puffer/")
    if not names:
        return None
    figure = Figure((11, 3.6), layout="constrained")
    kinds = sorted({name.split("/")[1] for name in names})
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for name in reading.names(f"puffer/{kind}/"):
            workers = reading.experiments[name]["notes"]["workers"]
            for label in reading.labels(name):
                rate = reading.estimate(name, label).median
                lines.setdefault(label, []).append((workers, rate))
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", label=label)
        axes.set_title(f"steps of {kind}", size=9)
        axes.set_xlabel("workers, 4 environments")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    panels[0].set_ylabel("frames/s")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    return figure


_SCALING_LABELS = (
    scaling.OURS_ASYNC,
    scaling.OURS_SYNC,
    scaling.FREE_SLEEPERS,
    scaling.BARRIER,
)
_PLOTS: dict[str, Callable[[Reading], Figure | None]] = {
    "Headline rows": rates,
    "Sleeping workers": curves,
    "PufferLib": puffer,
    "The trainer's cost of ParallelEnv": parent,
}


def _of_ideal(
    reading: Reading, names: list[str], label: str
) -> list[tuple[int, float]]:
    points = []
    for name in names:
        notes = reading.experiments[name]["notes"]
        try:
            rate = reading.estimate(name, label).median
        except MissingError:
            continue
        points.append((notes["workers"], rate / notes["ideal"]))
    return points


def _error(estimate: Estimate) -> Any:
    middle = estimate.median
    return [[middle - estimate.low], [estimate.high - middle]]
