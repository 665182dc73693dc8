"""The Python on every page of the documentation runs, in the order of the page."""

import re
from pathlib import Path

import pytest

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


def test_no_example_hides_behind_another_mark() -> None:
    for page in DOCS.rglob("*.md"):
        marks = re.findall(r"^```py(?!thon$).*$", page.read_text("utf-8"), re.M)
        assert not marks, f"{page.name}: write {NOT_RUN.strip()} before the block"
