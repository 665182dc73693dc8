"""Hooks of the documentation's build: the changelog and the examples as pages.

``<!-- example: NAME -->`` in a page becomes the code of ``examples/NAME.py``, below the
picture ``docs/pictures/NAME.png`` if there is one. ``<!-- every example -->`` becomes a
section of each example. So no code is written twice.
"""

import ast
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ONE = re.compile(r"<!-- example: ([a-z]\w*) -->")
_EVERY = "<!-- every example -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page with what it includes."""
    if page.file.src_uri == "changelog.md":  # Its links start in the checkout.
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        return text.replace("](docs/", "](")
    folder = ROOT / "docs" / Path(page.file.src_uri).parent
    markdown = markdown.replace(_EVERY, _every_example(folder))
    return _ONE.sub(lambda match: example(match[1], folder), markdown)


def example(name: str, folder: Path) -> str:
    """Return the code and the picture of an example, for a page in ``folder``.

    Raises:
        FileNotFoundError: if there is no such example.
    """
    code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    picture = ROOT / "docs" / "pictures" / f"{name}.png"
    shown = ""
    if picture.exists():
        shown = f"![Curve of {name}]({os.path.relpath(picture, folder)})\n\n"
    return f'{shown}```python title="examples/{name}.py"\n{code}```'


def _every_example(folder: Path) -> str:
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        summary = (ast.get_docstring(module) or "").partition("\n\n")[0]
        parts.append(f"## {path.stem}\n\n{summary}\n\n{example(path.stem, folder)}")
    return "\n\n".join(parts)
