"""The Python on every page of the documentation runs, in the order of the page."""

import re
from pathlib import Path
from types import SimpleNamespace

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
    "tutorials/evaluate.md": "imageio_ffmpeg",
    "tutorials/meltingpot.md": "dmlab2d",
    "tutorials/off_policy.md": "torchrl",
    "tutorials/own_network.md": "torchrl",
}


def pages() -> list[str]:
    found = [
        page for page in DOCS.rglob("*.md") if BLOCK.search(page.read_text("utf-8"))
    ]
    return sorted(str(page.relative_to(DOCS)) for page in found)


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
    for page in DOCS.rglob("*.md"):
        marks = re.findall(r"^```py(?!thon$).*$", page.read_text("utf-8"), re.M)
        assert not marks, f"{page.name}: write {NOT_RUN.strip()} before the block"


def test_included_examples_exist_and_are_shown_on_the_site():
    script = DOCS.parent / "scripts" / "mkdocs_hooks.py"
    hooks = {"__file__": str(script), "__name__": "mkdocs_hooks"}
    exec(compile(script.read_text("utf-8"), str(script), "exec"), hooks)
    pages = {str(p.relative_to(DOCS)): p.read_text("utf-8") for p in DOCS.rglob("*.md")}
    included = 0
    for name, text in pages.items():
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        shown = hooks["on_page_markdown"](text, page=page)
        for example in re.findall(r"<!-- example: ([a-z]\w*) -->", text):
            code = (DOCS.parent / "examples" / f"{example}.py").read_text("utf-8")
            assert f'```python title="examples/{example}.py"\n{code}```' in shown
            included += 1
    assert included >= 5
    page = SimpleNamespace(file=SimpleNamespace(src_uri="examples.md"))
    shown = hooks["on_page_markdown"](pages["examples.md"], page=page)
    for example in (DOCS.parent / "examples").glob("*.py"):
        assert f"## {example.stem}\n" in shown
        picture = f"pictures/{example.stem}.png"
        assert (f"]({picture})" in shown) == (DOCS / picture).exists()
