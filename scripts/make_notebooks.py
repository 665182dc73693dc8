"""Write the notebooks from pages of the documentation, so that they say the same.

A notebook has a cell per text or block of Python. Tests run the Python of the pages and
compare the notebooks with it. Run without arguments to write; with ``--check`` to
compare only.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from generated import update

ROOT = Path(__file__).parents[1]
PAGES = ("quickstart", "tutorials/own_environment", "tutorials/evaluate")
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)")


def notebook(page: str) -> str:
    """Return the notebook of a page as JSON."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    folder = Path("..") / Path(page).parent
    text = _LINK.sub(f"]({folder.as_posix()}/", text)
    cells, at = [], 0
    for match in _BLOCK.finditer(text):
        cells += [
            *_cell("markdown", text[at : match.start()]),
            *_cell("code", match[1]),
        ]
        at = match.end()
    cells += _cell("markdown", text[at:])
    for number, cell in enumerate(cells):
        cell["id"] = f"{Path(page).name}-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, text: str) -> list[dict[str, Any]]:
    if not text.strip():
        return []
    cell: dict[str, Any] = {
        "cell_type": kind,
        "metadata": {},
        "source": text.strip().splitlines(keepends=True),
    }
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return [cell]


def main() -> int:
    """Write or compare the notebooks; 1 if there was a difference."""
    folder = ROOT / "docs" / "notebooks"
    notebooks = {folder / f"{Path(page).name}.ipynb": notebook(page) for page in PAGES}
    return update(notebooks, "python scripts/make_notebooks.py")


if __name__ == "__main__":
    sys.exit(main())
