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
    "meltingpot.md": "dmlab2d",
    "quickstart.md": "imageio_ffmpeg",
    "rendering.md": "imageio_ffmpeg",
    "training.md": "torchrl",
}


def pages() -> list[str]:
    found = [
        page for page in DOCS.glob("*.md") if BLOCK.search(page.read_text("utf-8"))
    ]
    return sorted(page.name for page in found)


@pytest.mark.parametrize("page", pages())
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason=f"{page} needs {NEEDS[page]}")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "example"}
    blocks = BLOCK.findall((DOCS / page).read_text("utf-8"))
    run = [code for skipped, code in blocks if not skipped]
    for number, code in enumerate(run):
        exec(compile(code, f"{page}, block {number}", "exec"), space)
    # A page whose examples are all left out must say so here.
    assert run or page in ("coming_from_torchrl.md", "distribution.md")


def test_no_example_hides_behind_another_mark():
    for page in DOCS.glob("*.md"):
        marks = re.findall(r"^```py(?!thon$).*$", page.read_text("utf-8"), re.M)
        assert not marks, f"{page.name}: write {NOT_RUN.strip()} before the block"
