"""Griffe extension of the reference: prepares docstrings and signatures for MkDocs.

Two things in the source cannot be read from it as it stands:

- Constructors and functions whose arguments are declared as options
  (``marl_collect.options``) show one argument there. They get the real signature, and a
  link to the page of all options.
- Tables in docstrings are written for the terminal, with lines of ``=``. They become
  Markdown tables.
"""

import importlib
import inspect
import re
from enum import Enum
from typing import Any

import griffe

_RULE = re.compile(r"^=+(?:  ?=+)+$")
_DECLARED = re.compile(r"^(?:method|function)\(\w+\)$")
_LINK = "[All options](../options.md) describes the arguments."


class ApiPages(griffe.Extension):
    """Changes what the reference shows of functions and docstrings."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Give a function the arguments that its options declare."""
        for decorator in func.decorators:
            if _DECLARED.match(str(decorator.value)):
                _set_parameters(func)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the tables of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _with_tables(obj.docstring.value)


def _set_parameters(func: griffe.Function) -> None:
    """Give a function the names and defaults that it has at run time."""
    target: Any = importlib.import_module(func.module.path)
    for name in func.path.removeprefix(func.module.path + ".").split("."):
        target = getattr(target, name)
    func.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                parameter.name,
                kind=griffe.ParameterKind(parameter.kind.description),
                default=_text(parameter.default),
            )
            for parameter in inspect.signature(target).parameters.values()
        )
    )
    if func.docstring is not None:
        func.docstring.value += f"\n\n{_LINK}"


def _text(default: Any) -> str | None:
    if default is inspect.Parameter.empty:
        return None
    if isinstance(default, Enum):
        return f"{type(default).__name__}.{default.name}"
    return repr(default)


def _with_tables(text: str) -> str:
    """Return a docstring whose tables are Markdown."""
    lines, out = text.split("\n"), []
    at = 0
    while at < len(lines):
        indent = len(lines[at]) - len(lines[at].lstrip())
        if not _RULE.match(lines[at].strip()):
            out.append(lines[at])
            at += 1
            continue
        block = [at]
        while len(block) < 3:
            at += 1
            if at == len(lines):
                return text
            if _RULE.match(lines[at].strip()):
                block.append(at)
        out += _table(
            [line[indent:] for line in lines[block[0] : block[2] + 1]], indent
        )
        at += 1
    return "\n".join(out)


def _table(block: list[str], indent: int) -> list[str]:
    starts = [match.start() for match in re.finditer(r"=+", block[0])]
    ends = [*starts[1:], None]

    def cells(line: str) -> list[str]:
        return [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]

    rows: list[list[str]] = []
    for line in block[1:-1]:
        if _RULE.match(line.strip()):
            continue
        row_cells = cells(line)
        if row_cells[0] or not rows:
            rows.append(row_cells)
        else:  # A continuation of the row above.
            rows[-1] = [
                f"{a} {b}".strip() for a, b in zip(rows[-1], row_cells, strict=True)
            ]
    head, *body = rows
    table_lines = [
        "| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)
    ]
    return [" " * indent + line for line in ["", *table_lines, ""]]
