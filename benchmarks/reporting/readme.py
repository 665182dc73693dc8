"""The README's table: the headline rows, with what was measured beside them."""

from collections.abc import Mapping
from typing import Any

from experiments.headline import DIRECT, OURS, OURS_LARGE, STOCK
from harness.estimates import number
from workloads.table import WORKLOADS

from reporting.reading import MissingError, Reading

BEGIN, END = "<!-- benchmarks/report.py -->", "<!-- end -->"
_RATES = "| frames/s of environment, policy | stock loops | TorchRL | ours |"
_RATIOS = "| times as fast as | stock loops | direct loops | TorchRL |"


def readme_table(results: Mapping[str, Any]) -> str:
    """Return Markdown: frames/s of every headline row, ratios with their intervals."""
    reading = Reading(results)
    rule = "|---|" + "---:|" * 3
    names = reading.names("headline/")
    rows = [_line(reading, name) for name in names]
    lines = [_RATES, rule, *(rates for rates, _ in rows), ""]
    lines += [_RATIOS, rule, *(ratios for _, ratios in rows), ""]
    return "\n".join([*lines, _ran_on(reading)])


def between_marks(text: str) -> str:
    """Return what stands between the marks in a document.

    Raises:
        ValueError: if the marks are not there.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[begin:end].strip()


def with_table(text: str, results: Mapping[str, Any]) -> str:
    """Return a document with the table of a run between its marks.

    Raises:
        ValueError: if the marks are not there.
    """
    old = f"{BEGIN}\n{between_marks(text)}\n{END}"
    return text.replace(old, f"{BEGIN}\n{readme_table(results)}\n{END}")


def _line(reading: Reading, name: str) -> tuple[str, str]:
    """Return the rows of an experiment in both tables."""
    _, workload, policy = name.split("/")
    try:
        torchrl = reading.fastest(name, "torchrl")
    except MissingError:
        torchrl = ""
    # Small batches are there for what is measured between resets.
    ours = OURS_LARGE if OURS_LARGE in reading.labels(name) else OURS
    rates = [_cell(reading, name, label, None) for label in (STOCK, torchrl, ours)]
    ratios = [_cell(reading, name, ours, x) for x in (STOCK, DIRECT, torchrl)]
    title = WORKLOADS[workload].title
    first = f"| {title}, {policy}"
    return " | ".join([first, *rates]) + " |", " | ".join([first, *ratios]) + " |"


def _cell(reading: Reading, name: str, label: str, other: str | None) -> str:
    try:
        if other is None:
            return number(reading.estimate(name, label).median)
        return str(reading.ratio(name, label, other))
    except MissingError:
        return "-"


def _ran_on(reading: Reading) -> str:
    machine = reading.run["machine"]
    versions = machine["versions"]
    names = reading.names("headline/")
    rounds = {reading.experiments[name]["rounds"] for name in names}
    lengths = [reading.experiments[name]["window"] for name in names]
    windows = f"{min(rounds, default=0)} windows of {min(lengths, default=0):.1f} s"
    return (
        f"Frames/s and ratios with 95 % intervals: medians of {windows} or longer, in "
        f"turn, {reading.run['workers']} workers on {machine['cores']} cores of "
        f"{machine['cpu']}; TorchRL {versions.get('torchrl', 'missing')}, torch "
        f"{versions.get('torch', 'missing')}, {machine['date'][:10]}."
    )
