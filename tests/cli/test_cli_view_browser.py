"""A real browser shows the pages of ``marl-collect view``."""

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.browser import CHROMIUM, Browser
from support.scripts import LIMIT, run_python, start_python
from workloads.counting import CountingEnv

from marl_collect import record

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason="needs chromium"),
]
VIEW = ("-m", "marl_collect.cli.main", "view")
RETURNS = ["-10", "-9", "6", "12"]
LENGTHS = ["11", "5", "5", "8"]
NUMBERS = ".row > span:nth-child(1)"
TEAM = ".row > span:nth-child(2)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "data"
    record(folder, CountingEnv, None, episodes=4, seed=0, num_workers=1)
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser
        assert browser.errors == []


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the page of a folder; yield its address."""
    with start_python(*VIEW, folder, "--no-browser") as program:
        assert program.stdout is not None
        yield program.stdout.readline().split()[0]
        program.send_signal(signal.SIGINT)
        assert program.wait(LIMIT) == 0


def plays_and_filters(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait_for("document.querySelectorAll('.row').length === 4")
    browser.wait_for("document.getElementById('about').textContent !== ''")
    assert browser.texts(TEAM) == RETURNS
    assert browser.texts(".row > span:nth-child(3)") == LENGTHS
    assert browser.texts("#about")[0].startswith("Episode 0: ")
    assert "The episodes cannot be drawn" in browser.texts("#pictures")[0]
    browser.click(".row:nth-of-type(2)")
    browser.wait_for("document.getElementById('at').textContent === 'frame 0 of 5'")
    assert browser.texts("#about")[0].startswith("Episode 1: ")
    assert browser.texts(".row.chosen > span")[0] == "1"
    # In one call: the episode may have ended by the next one.
    play = "document.getElementById('play')"
    assert browser.value(f"{play}.click(), {play}.textContent") == "Pause"
    browser.wait_for("document.getElementById('at').textContent === 'frame 4 of 5'")
    browser.wait_for("document.getElementById('play').textContent === 'Play'")
    captions = browser.texts(".charts figcaption")
    assert "cumulative return" in captions[1]
    browser.fill("#from", "-9.5")
    assert browser.texts(NUMBERS) == ["1", "2", "3"]
    browser.fill("#to", "7")
    assert browser.texts(TEAM) == ["-9", "6"]
    assert browser.texts("#count") == ["2 of 4"]
    browser.fill("#order", "high")
    assert browser.texts(TEAM) == ["6", "-9"]
    browser.fill("#from", "")
    browser.fill("#to", "")
    assert browser.texts(TEAM) == RETURNS[::-1]
    headings = browser.texts("#agents h2")
    assert len(headings) > 1
    browser.fill("#agent", "0")
    assert browser.texts("#agents h2") == headings[:1]
    assert browser.texts("#count") == ["4 of 4"]
    browser.fill("#policy", "0")  # Random actions, in every episode.
    assert browser.texts("#count") == ["4 of 4"]


def test_a_served_page_plays_and_filters(browser: Browser, data: Path) -> None:
    with served(data) as address:
        plays_and_filters(browser, address)


def test_a_saved_page_plays(browser: Browser, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    selection = [f"--episode={number}" for number in range(4)]
    run_python(*VIEW, data, "--save", file, *selection, check=True)
    plays_and_filters(browser, file.as_uri())
