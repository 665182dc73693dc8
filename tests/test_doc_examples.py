"""The Python on every page of the documentation runs, in the order of the page.

Notebooks have the cells of their pages.
"""

import json
import re
from pathlib import Path

import pytest
from make_notebooks import PAGES as PAGES_OF_NOTEBOOKS

pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
pytest.importorskip("mpe2", reason="needs the extra mpe")
pytest.importorskip("Box2D", reason="needs the extra pettingzoo")

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOT_RUN = "<!-- not run -->\n"
BLOCK = re.compile(rf"({NOT_RUN})?```python\n(.*?)```", re.DOTALL)
NEEDS = {
    "environments.md": "vmas",
    "examples.md": "torchrl",
    "meltingpot.md": "dmlab2d",
    "quickstart.md": "imageio_ffmpeg",
    "rendering.md": "imageio_ffmpeg",
    "tutorials/evaluate.md": "imageio_ffmpeg",
    "tutorials/own_network.md": "torchrl",
}


def pages() -> list[str]:
    paths = [
        page for page in DOCS.rglob("*.md") if BLOCK.search(page.read_text("utf-8"))
    ]
    return sorted(str(page.relative_to(DOCS)) for page in paths)


def examples(page: str) -> list[str]:
    """Return the blocks of a page that run."""
    blocks = BLOCK.findall((DOCS / page).read_text("utf-8"))
    return [code for skipped, code in blocks if not skipped]


@pytest.mark.processes
@pytest.mark.parametrize("page", pages())
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason=f"{page} needs {NEEDS[page]}")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}  # As in a notebook.
    codes = examples(page)
    for number, code in enumerate(codes):
        text = code.replace("frames = 20_000", "frames = 1_000")
        exec(compile(text, f"{page}, block {number}", "exec"), space)
    # A page whose examples are all left out must say so here.
    assert codes or page in ("coming_from_torchrl.md", "distribution.md")


@pytest.mark.parametrize("page", PAGES_OF_NOTEBOOKS)
def test_the_cells_of_a_notebook_are_the_examples_of_its_page(page: str) -> None:
    path = DOCS / "notebooks" / f"{Path(page).name}.ipynb"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    cells = content["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    links = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#:]+)\)", links):
        assert (path.parent / target).exists(), target
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert code
    assert code == [block.strip() for block in examples(f"{page}.md")]


def test_no_example_hides_behind_another_mark() -> None:
    for page in DOCS.rglob("*.md"):
        marks = re.findall(r"^```py(?!thon$).*$", page.read_text("utf-8"), re.M)
        assert not marks, f"{page.name}: write {NOT_RUN.strip()} before the block"
