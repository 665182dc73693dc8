"""The report: a Markdown file, and its pictures beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reporting.plots import plots
from reporting.reading import Reading
from reporting.tables import Section, sections

_ABOUT = (
    "Systems of one table ran in turn, window by window, forwards and backwards; "
    "ratios are taken within a round, and medians and 95 % bootstrap intervals are "
    "over rounds. Every byte of every batch is read. Ratios carry over to other "
    "machines, absolute numbers do not. docs/benchmarks.md has the protocol."
)
_TEXT_COLUMNS = 5
"""Tables of at most as many columns have text in them; others have numbers."""


def write_page(results: Mapping[str, Any], json_path: Path) -> Path:
    """Write the report and its pictures beside a run's JSON; return its path."""
    reading = Reading(results)
    targets, *tables = sections(reading)
    blocks = ["# Benchmarks", _ABOUT, _describe(reading), table(targets)]
    for name, title, figure in plots(reading):
        picture = json_path.with_name(f"{json_path.stem}_{name}.png")
        figure.savefig(picture, dpi=110, metadata={"Software": None})
        blocks += [f"## {title}", f"![{title}]({picture.name})"]
    blocks += [table(section) for section in tables]
    path = json_path.with_suffix(".md")
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return path


def table(section: Section) -> str:
    """Return a section in Markdown."""
    textual = len(section.head) <= _TEXT_COLUMNS
    rule = "|---|" + ("---|" if textual else "---:|") * (len(section.head) - 1)
    lines = [_line(section.head), rule, *(_line(cells) for cells in section.rows)]
    return f"## {section.title}\n\n{section.text}\n\n" + "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    escaped = (
        cell.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
        for cell in cells
    )
    return f"| {' | '.join(escaped)} |"


def _describe(reading: Reading) -> str:
    blocks = ["## Machine and versions, newest run first"]
    for run in reversed(reading.data["runs"]):
        seconds = run.get("wall_seconds")
        took = "interrupted" if seconds is None else f"{seconds / 60:.1f} minutes taken"
        duration = f"{run['minutes']:g} minutes asked for, {took}"
        experiments = " ".join(run["only"]) or "everything"
        machine = json.dumps(run["machine"], indent=1)
        blocks.append(f"{experiments}: {duration}, {run['workers']} workers")
        blocks.append(f"```json\n{machine}\n```")
    return "\n\n".join(blocks)
