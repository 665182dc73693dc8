"""The report: one HTML file that needs nothing else, not even a network."""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reporting.plots import plots
from reporting.reading import Reading
from reporting.tables import Section, sections

_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem; color: #1b1f24; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 12px; }
.wide { overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right;
  vertical-align: top; font-variant-numeric: tabular-nums; }
th { background: #f3f5f7; } td:first-child, th:first-child { text-align: left; }
.text td { text-align: left; overflow-wrap: anywhere; }
tr.pass td:nth-child(4) { background: #d6f3dc; }
tr.fail td:nth-child(4) { background: #fbd9d7; }
tr.missing td:nth-child(4) { background: #fdf0c8; }
svg { max-width: 100%; height: auto; } p { max-width: 50rem; }
pre { background: #f3f5f7; padding: .8rem; overflow-x: auto; font-size: 12px; }
"""
_ABOUT = (
    "Systems of one table ran in turn, window by window, forwards and backwards; "
    "ratios are taken within a round, and medians and 95 % bootstrap intervals are "
    "over rounds. Every byte of every batch is read. Ratios carry over to other "
    "machines, absolute numbers do not. docs/benchmarks.md has the protocol."
)


def write_page(data: Mapping[str, Any], json_path: Path) -> Path:
    """Write the report beside a run's JSON and return its path."""
    path = json_path.with_suffix(".html")
    path.write_text(page(data), encoding="utf-8")
    return path


def page(data: Mapping[str, Any]) -> str:
    """Return the report."""
    reading = Reading(data)
    parts = [_describe(reading)]
    first, *others = sections(reading)
    parts.append(_table(first))
    for title, svg in plots(reading):
        parts.append(f"<h2>{html.escape(title)}</h2>\n<figure>{svg}</figure>")
    parts += [_table(section) for section in others]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>marl_collect benchmarks</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>marl_collect benchmarks</h1>\n<p>{_ABOUT}</p>\n{body}\n"
        "</body>\n</html>\n"
    )


def _describe(reading: Reading) -> str:
    runs = []
    for run in reversed(reading.data["runs"]):
        seconds = run.get("wall_seconds")
        took = "interrupted" if seconds is None else f"{seconds / 60:.1f} minutes"
        machine = json.dumps(run["machine"], indent=1)
        asked = f"{run['minutes']:g} minutes asked for, {took} taken"
        what = " ".join(run["only"]) or "everything"
        summary = html.escape(f"{what}: {asked}, {run['workers']} workers")
        runs.append(
            f"<details><summary>{summary}</summary>"
            f"<pre>{html.escape(machine)}</pre></details>"
        )
    return "<h2>Machine and versions, newest run first</h2>" + "".join(runs)


def _table(section: Section) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in section.head)
    rows = []
    for number, cells in enumerate(section.rows):
        kind = section.kind[number].split(" ")[-1] if section.kind else ""
        kind = "missing" if kind == "measured" else kind
        content = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr class="{kind}">{content}</tr>')
    textual = len(section.head) <= 5 and not section.kind
    style = "wide text" if textual else "wide"
    return (
        f"<h2>{html.escape(section.title)}</h2>\n<p>{html.escape(section.text)}</p>\n"
        f'<div class="{style}"><table><thead><tr>{head}</tr></thead>\n<tbody>'
        + "\n".join(rows)
        + "</tbody></table></div>"
    )
