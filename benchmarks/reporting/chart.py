"""The README's chart: ours, TorchRL, PufferLib and loops without a framework."""

from contextlib import suppress
from typing import Any

from experiments.headline import DIRECT, OURS, OURS_LARGE, STOCK
from harness.estimates import number
from matplotlib.figure import Figure
from workloads.table import WORKLOADS

from reporting.reading import MissingError, Reading

_PANELS = {
    "headline/multiwalker/mlp": "torchrl",
    "headline/simple_spread/mlp": "torchrl",
    "headline/commons_harvest/random": "torchrl",
    "puffer/100us/2": "PufferLib",
}
"""Experiment to the other library that is shown there, in its fastest configuration."""

_NAMES = {"torchrl": "TorchRL", "PufferLib": "PufferLib"}
COLOURS = {
    "marl_collect": "C0",
    "stock loops": "C7",
    "direct loops": "C2",
    "TorchRL": "C1",
    "PufferLib": "C3",
}


def draw(reading: Reading) -> Figure:
    """Return the chart: a panel per environment, and a bar per system in frames/s."""
    # Two columns, so that the text is readable on a phone.
    figure = Figure((6, 3.8), layout="constrained")
    panels = figure.subplots(-(-len(_PANELS) // 2), 2).flat
    for axes, (name, other_label) in zip(panels, _PANELS.items(), strict=True):
        _panel(axes, reading, name, other_label)
    return figure


def _panel(axes: Any, reading: Reading, name: str, other_label: str) -> None:
    ours = OURS_LARGE if OURS_LARGE in reading.labels(name) else OURS
    bars = {"direct loops": DIRECT, "marl_collect": ours, "stock loops": STOCK}
    with suppress(MissingError):
        bars[_NAMES[other_label]] = reading.fastest(name, other_label)
    rates = {}
    for title, label in bars.items():
        try:
            rates[title] = reading.estimate(name, label).median
        except MissingError:
            continue
    colours = [COLOURS[title] for title in rates]
    axes.barh(list(rates), list(rates.values()), color=colours)
    for row, rate in enumerate(rates.values()):
        axes.text(rate, row, f" {number(rate)}", va="center", size=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(rates.values()) * 1.4)
    axes.set_xticks([])
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.set_title(_title(name), size=9)
    axes.set_xlabel("frames/s", size=8)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _title(name: str) -> str:
    kind, workload, policy = name.split("/")
    if kind == "puffer":
        return f"steps of {workload.removesuffix('us')} us"
    return f"{WORKLOADS[workload].title.split(',')[0]}, {policy}"
