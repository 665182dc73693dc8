"""The documentation as a site: complete, without parts from elsewhere, not cut."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from support.browser import CHROMIUM, Browser
from support.scripts import run_python

pytest.importorskip("mkdocs", reason="needs the extra dev")

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://example.org/team/project"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(500),  # It imports torch.
    pytest.mark.xdist_group("site"),  # It is built once.
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    process = run_python(
        *("-m", "mkdocs", "build", "--strict", "--site-dir", folder),
        cwd=ROOT,
        env=os.environ | {"REPOSITORY_URL": REPOSITORY, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert process.returncode == 0, process.stderr
    return folder


def pages(site: Path) -> dict[Path, str]:
    paths = set(site.rglob("*.html")) - {site / "404.html"}  # That is a server's.
    return {path: path.read_text("utf-8") for path in sorted(paths)}


def test_every_public_name_has_its_signature(site: Path) -> None:
    text = "".join(
        (site / path).with_suffix(".html").read_text("utf-8")
        for path in reference.signatures()
    )
    index = (site / "reference.html").read_text("utf-8")
    for modules in reference.SECTIONS.values():
        for module, names in modules.items():
            for name in names.split():
                assert f'id="{module}.{name}"' in text
                assert f'#{module}.{name}"' in index


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for path, text in pages(site).items():
        loaded = re.findall(r'(?:src|<link[^>]* href)="([^"]*)"', text)
        assert [address for address in loaded if "//" in address] == [], path
        for address in loaded:
            if not address.startswith("data:"):
                assert (path.parent / address.partition("?")[0]).exists(), address


def test_the_search_works_on_pages_from_the_disk(site: Path) -> None:
    # Browsers let pages from the disk read scripts, but neither data nor workers.
    index = (site / "search" / "search_index.js").read_text("utf-8")
    assert index.startswith("var __index = {")
    assert "MultiSyncCollector" in index
    for path, text in pages(site).items():
        assert "iframe-worker.js" in text, path


def test_pages_have_a_dark_mode_and_a_link_to_the_repository(site: Path) -> None:
    for path, text in pages(site).items():
        assert 'data-md-color-scheme="slate"' in text
        assert f'href="{REPOSITORY}"' in text, path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if shutil.which(CHROMIUM) is None:
        pytest.skip("needs chromium")
    with Browser(tmp_path / "profile") as browser:
        yield browser


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_its_window(
    site: Path, browser: Browser, width: int
) -> None:
    browser.resize(width, 900)
    for path in pages(site):
        browser.open(path.as_uri())
        browser.wait_for("document.readyState === 'complete'")
        # On a phone, code and tables scroll within the page.
        inside = "pre > code, table" if width == 1280 else "none"
        cut = browser.value(
            f"[document.documentElement, ...document.querySelectorAll('{inside}')]"
            ".filter(each => each.scrollWidth > each.clientWidth + 1)"
            ".map(each => each.innerText.slice(0, 80))"
        )
        assert cut == [], path.name


def test_the_search_finds_the_collectors(site: Path, browser: Browser) -> None:
    browser.open((site / "index.html").as_uri())
    browser.wait_for("document.readyState === 'complete'")
    field = "document.querySelector('[data-md-component=search-query]')"
    browser.value(f"{field}.focus(), {field}.value = 'MultiSyncCollector', 1")
    for name in ("focus", "input", "keyup", "change"):
        browser.value(f"{field}.dispatchEvent(new Event('{name}', {{bubbles: true}}))")
    browser.wait_for(
        "document.querySelectorAll('.md-search-result__item a').length > 0"
    )
    links = browser.value(
        "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href)"
    )
    assert any("collect" in link for link in links)
