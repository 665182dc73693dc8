"""Write the tables of options in the documentation from their declarations.

A page has the place of a table between two comments, which name a class of options, or
a table of rejected keywords::

    <!-- options: marl_collect.collectors.options.BatchOptions -->
    <!-- end of options -->

Run without arguments to write them all; with ``--check`` to compare only.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from marl_collect.options import RejectedKeyword, declared

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(
    r"(<!-- options: (?P<name>[\w.]+) -->\n).*?(<!-- end of options -->\n)", re.DOTALL
)


def main() -> int:
    """Write or compare the tables of all pages; 1 if there was a difference."""
    different = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        expected = PLACE.sub(_written, text)
        if text != expected:
            different.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(expected, encoding="utf-8")
    if different:
        print("Tables of options that differ from the declarations:", *different)
        print("`python scripts/option_tables.py` writes them.")
    return int(bool(different))


def _written(match: re.Match[str]) -> str:
    module, _, name = match["name"].rpartition(".")
    thing = getattr(import_module(module), name)
    table = _rejected(thing) if isinstance(thing, Mapping) else _options(thing)
    return f"{match[1]}\n{table}\n\n{match[3]}"


def _options(kind: Any) -> str:
    """Return the table of what a class of options itself declares."""
    lines = ["| argument | default | meaning |", "|---|---|---|"]
    for name, _, default, option in declared(kind):
        if name in kind.__annotations__:
            places = ", ".join(f"`{place}`" for place in option.not_in)
            text = f"{option.help}. Not for {places}" if places else option.help
            lines.append(f"| `{name}` | {_shown(default)} | {text} |")
    return "\n".join(lines)


def _rejected(keywords: Mapping[str, RejectedKeyword]) -> str:
    lines = ["| TorchRL | here |", "|---|---|"]
    lines += [f"| `{name}` | {other.advice} |" for name, other in keywords.items()]
    return "\n".join(lines)


def _shown(default: Any) -> str:
    if default is MISSING:
        return ""
    if isinstance(default, Enum):
        return default.name
    return f"`{default!r}`"


if __name__ == "__main__":
    sys.exit(main())
