"""Prints each target with the result of a run, and pass or fail.

    python benchmarks/check_targets.py runs/benchmarks.json

The median decides between pass and fail. "interval" is "sure" if the whole 95 %
interval lies on the same side of the bound, otherwise "open". The exit status is 0 if
all targets are passed, otherwise 1. Ratios to the limits follow below the targets, if
measured.
"""

import argparse
import sys
from pathlib import Path

from harness.results import load
from reporting.limits import beside_targets
from reporting.reading import Reading
from reporting.targets import judge
from rich.console import Console
from rich.table import Table

_COLOURS = {"pass": "green", "fail": "red", "not measured": "yellow"}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    reading = Reading(load(arguments.result))
    verdicts = judge(reading)
    table = Table(box=None)
    for column in ("target", "aim", "median (95 % interval)", "", "interval"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        title, aim, figure, word, sure = verdict.cells
        table.add_row(title, aim, figure, f"[{_COLOURS[word]}]{word}[/]", sure)
    for comparison, ratio in beside_targets(reading):
        table.add_row(f"no target: {comparison}", "", str(ratio), "", "")
    width = None if sys.stdout.isatty() else 170
    console = Console(width=width, highlight=False)
    console.print(table)
    n_passed = sum(verdict.passed for verdict in verdicts)
    console.print(f"{n_passed} of {len(verdicts)} targets are passed.")
    sys.exit(0 if n_passed == len(verdicts) else 1)


if __name__ == "__main__":
    main()
