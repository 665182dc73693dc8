"""HTML tables for notebooks. All text is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def facts(title: str, rows: Mapping[str, Any]) -> str:
    """Return a table with one name and value per line, under a title."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with a header row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(title)}</caption><tr>{head}</tr>{body}</table>"


def statistics(title: str, stats: Mapping[str, Any]) -> str:
    """Return a table of a collector's metrics, with formatted numbers."""
    return facts(title, {name: _readable(value) for name, value in stats.items()})


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return f"{value:,}"
