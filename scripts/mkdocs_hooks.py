"""Hooks of the documentation's build: pages from the source, checks of the built site.

Pages link to files of the checkout. The site has the examples too, and its links lead
to them. Its reference leads to pages of signatures; README and changelog are pages.

``mkdocs build --strict`` fails if the built site has one of the ``problems``.
"""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import reference  # noqa: E402 - of this folder

ROOT_FILES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
"""Pages that are files of the checkout, where their links start."""
_ROLE = re.compile(r":(class|meth|func|attr|mod):(`|<code>)")
LARGEST_PAGE = 600_000
"""Characters. Browsers are slow to show more; a table belongs in a file then."""


def on_files(files: Any, *, config: Any) -> Any:
    """Add the examples and the pages of signatures to the files of the site."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        name = f"examples/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, text in reference.signatures().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page, whose links to examples stay within the site."""
    if name := ROOT_FILES.get(page.file.src_uri):
        text = (ROOT / name).read_text(encoding="utf-8")
        return text.replace("](docs/", "](")
    markdown = markdown.replace("](../README.md", "](index.md")
    if page.file.src_uri == "reference.md":
        return reference.on_site(markdown)
    return re.sub(r"\]\(\.\./((?:\.\./)*examples/)", r"](\1", markdown)


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
    if "parsed: CollectorOptions" in reference:
        yield "api/collecting.html shows the parsed arguments in place of the options"
