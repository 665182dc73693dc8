"""Hooks of the documentation's build: examples as pages, checks of the built site.

``<!-- example: NAME -->`` in a page becomes the code of ``examples/NAME.py``, below the
picture ``docs/pictures/NAME.png`` if there is one. ``<!-- every example -->`` becomes a
section of each example. So no code is written twice. The changelog is a page too.

``mkdocs build --strict`` fails if the built site has one of the ``problems``.
"""

import ast
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ONE = re.compile(r"<!-- example: ([a-z]\w*) -->")
_EVERY = "<!-- every example -->"
_ROLE = re.compile(r":(class|meth|func|attr|mod):(`|<code>)")
LARGEST_PAGE = 600_000
"""Characters. Browsers are slow to show more; a table belongs in a file then."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page with what it includes."""
    if page.file.src_uri == "changelog.md":  # Its links start in the checkout.
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        return text.replace("](docs/", "](")
    folder = ROOT / "docs" / Path(page.file.src_uri).parent
    if _EVERY in markdown:
        markdown = markdown.replace(_EVERY, _every_example(folder))
    return _ONE.sub(lambda match: example(match[1], folder), markdown)


def example(name: str, folder: Path) -> str:
    """Return the code and the picture of an example, for a page in ``folder``.

    Raises:
        FileNotFoundError: if there is no such example.
    """
    code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    picture = ROOT / "docs" / "pictures" / f"{name}.png"
    picture_line = ""
    if picture.exists():
        picture_line = f"![Curve of {name}]({os.path.relpath(picture, folder)})\n\n"
    return f'{picture_line}```python title="examples/{name}.py"\n{code}```'


def _every_example(folder: Path) -> str:
    sections = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        summary = (ast.get_docstring(module) or "").partition("\n\n")[0]
        sections.append(f"## {path.stem}\n\n{summary}\n\n{example(path.stem, folder)}")
    return "\n\n".join(sections)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Warn of what is wrong with the built site; with ``--strict`` that is an error."""
    log = logging.getLogger("mkdocs.hooks")  # Warnings below "mkdocs" are counted.
    for problem in problems(Path(config["site_dir"]), Path(config["docs_dir"])):
        log.warning(problem)


def problems(site: Path, docs: Path) -> Iterator[str]:
    """Yield what is wrong with a built site, beyond broken links."""
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    built_stems = {path.stem for path in pages}
    for source in docs.rglob("*.md"):
        if source.stem not in built_stems:
            yield f"{source.name} is not on the site"
    for path, text in pages.items():
        if _ROLE.search(text):
            yield f"{path.name} shows a role of Sphinx, such as :class:, as text"
        if len(text) >= LARGEST_PAGE:
            yield f"{path.name} has {len(text)} characters"
    reference = pages.get(site / "api" / "collecting.html", "")
    if "frames_per_batch" not in reference:
        yield "api/collecting.html lacks the options of collectors"
    if "parsed: CollectorArguments" in reference:
        yield "api/collecting.html shows the parsed arguments in place of the options"
