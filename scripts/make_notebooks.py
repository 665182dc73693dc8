"""Write the notebooks from pages of the documentation, with what their cells print.

A notebook has a cell per text or block of Python. Run without arguments to run the
cells and write the notebooks, which takes a minute; with ``--check`` to compare the
cells only: tests/test_docs.py runs the Python of the pages.
"""

import ast
import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from generated import update

ROOT = Path(__file__).parents[1]
PAGES = ("quickstart", "tutorials/own_environment", "tutorials/evaluate")
_FOLDER = ROOT / "docs" / "notebooks"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)")


def notebook(page: str, *, run: bool) -> str:
    """Return the notebook of a page as JSON.

    Args:
        page: its path below the documentation's folder, without ``.md``.
        run: run the cells; otherwise their outputs are those of the file.
    """
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    folder = Path("..") / Path(page).parent
    text = _LINK.sub(f"]({folder.as_posix()}/", text)
    # What stands between the blocks of Python alternates with them.
    kinds = itertools.cycle(("markdown", "code"))
    parts = list(zip(kinds, map(str.strip, _BLOCK.split(text)), strict=False))
    parts = [(kind, part) for kind, part in parts if part]
    codes = [part for kind, part in parts if kind == "code"]
    printed = iter(_run(codes) if run else _earlier(page, len(codes)))
    cells: list[dict[str, Any]] = []
    for number, (kind, part) in enumerate(parts):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"{Path(page).name}-{number}",
            "metadata": {},
            "source": part.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": next(printed)}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    content = {"cells": cells, **about}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _run(codes: list[str]) -> list[list[dict[str, Any]]]:
    """Run cells one after the other in an empty folder; return the outputs of each."""
    outputs = []
    space: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code in codes:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                *statements, last = ast.parse(code).body
                exec(compile(ast.Module(statements, []), "cell", "exec"), space)
                # Of an expression at the end, a notebook shows the value.
                shown = isinstance(last, ast.Expr)
                end = ast.Interactive([last]) if shown else ast.Module([last], [])
                exec(compile(end, "cell", "single" if shown else "exec"), space)
            text = out.getvalue().splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": text}
            outputs.append([stream] if text else [])
    return outputs


def _earlier(page: str, count: int) -> list[list[dict[str, Any]]]:
    """Return the outputs of ``count`` cells that the notebook has now."""
    path = _FOLDER / f"{Path(page).name}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    return (outputs + [[]] * count)[:count]


def main() -> int:
    """Write or compare the notebooks; 1 if there was a difference."""
    run = "--check" not in sys.argv
    notebooks = {
        _FOLDER / f"{Path(page).name}.ipynb": notebook(page, run=run) for page in PAGES
    }
    return update(notebooks, "python scripts/make_notebooks.py")


if __name__ == "__main__":
    sys.exit(main())
