"""Signals, HTML tables, printable text, and families of environments that register."""

import os
import signal
import sys
import time
import unicodedata
from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from workloads.counting import CountingEnv

from marl_collect import Collector, record
from marl_collect.programs import notebooks, task_providers
from marl_collect.programs.interruption import Interruption
from marl_collect.programs.printable import printable
from marl_collect.storage.description import installed_versions


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_interrupts_and_sets_the_exit_code() -> None:
    with Interruption() as interruption:
        assert not interruption.happened
        with pytest.raises(KeyboardInterrupt):
            press()
        press()  # A repeated delivery of the same Ctrl-C.
        assert interruption.happened
    assert interruption.exit_code == 130
    press()  # Ignored: the command is exiting.


def test_a_deferred_signal_raises_nothing_until_it_is_asked_for() -> None:
    with Interruption() as interruption:
        with interruption.deferred():
            press()
        assert interruption.happened
        with pytest.raises(KeyboardInterrupt):
            interruption.raise_if_happened()


def test_a_later_signal_interrupts_the_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Interruption():
        with pytest.raises(KeyboardInterrupt):
            press()
        later = time.monotonic() + 5
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_later_signal_ends_a_long_section_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    with (
        Interruption() as interruption,
        interruption.deferred(lambda: messages.append("")),
    ):
        press()
        press()  # The same Ctrl-C.
        assert len(messages) == 1
        later = time.monotonic() + 5
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            press()
    assert len(messages) == 1


def test_without_a_signal_the_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        interruption.raise_if_happened()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_without_its_context_it_handles_no_signals() -> None:
    with Interruption().deferred(), pytest.raises(KeyboardInterrupt):
        press()


class Cells(HTMLParser):
    """The texts of a table; checks that tags are closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: Any) -> None:
        self.texts.append(data)


def test_environments_and_descriptions_show_their_groups() -> None:
    env = CountingEnv()
    html = env._repr_html_()
    assert html == env.description._repr_html_()
    texts = Cells(html).texts
    group = env.description.groups["hunter"]
    assert f"2: {', '.join(group.agents)}" in texts
    assert str(group.observation) in texts


def test_collectors_show_their_metrics() -> None:
    with Collector(CountingEnv, frames_per_batch=2000, seed=0) as collector:
        collector.next()
        texts = Cells(collector._repr_html_()).texts
        assert texts[0] == "Collector"
        assert texts[texts.index("frames") + 1] == "2,000"
        episodes = collector.stats()["episodes"]
        assert texts[texts.index("episodes") + 1] == f"{episodes:,}"


@pytest.mark.processes
def test_datasets_show_their_contents(tmp_path: Path) -> None:
    dataset = record(tmp_path / "d", CountingEnv, episodes=3, task="a<b>&c")
    texts = Cells(dataset._repr_html_()).texts
    assert texts[0] == "a<b>&c"
    assert texts[texts.index("episodes") + 1] == "3"
    assert "hunter" in texts


def test_text_is_escaped() -> None:
    assert "<b>" not in notebooks.facts("<b>", {"<b>": "<b>"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;cm0gLXJmIH4=\x07", r"\x1b]52;c;cm0gLXJmIH4=\x07"),
        ("\x1b]0;title\x1b\\", r"\x1b]0;title\x1b" + "\\"),
        ("\x9d52;c;eA==\x9c", r"\x9d52;c;eA==\x9c"),
        ("\x9b2J\x85\x7f\x08\r\x0b\x0c\x00", r"\x9b2J\x85\x7f\x08\r\x0b\x0c\x00"),
        ("a\u202egpj.exe\u2066b\u2069\u200f", r"a\u202egpj.exe\u2066b\u2069\u200f"),
        ("\u2028\u2029\ud800\U000e0041", r"\u2028\u2029\ud800\U000e0041"),
        ("two\nlines\tof äöü 日本 █▏…", "two\nlines\tof äöü 日本 █▏…"),
    ],
)
def test_characters_that_are_not_printable_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_no_control_or_format_character_is_left() -> None:
    shown = printable("".join(map(chr, range(sys.maxunicode + 1))))
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    assert left == {"\n", "\t"}
    assert not {"\u2028", "\u2029"} & set(shown)


class Versioned:
    """A family that depends on one installed package and one that is missing."""

    @staticmethod
    def packages() -> Any:
        return ["typer", "not-installed"]


class Plain:
    """A family without ``packages``."""


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*, group: str) -> Any:
        assert group == "marl_collect.tasks"
        return [
            EntryPoint("second", f"{__name__}:Plain", group),
            EntryPoint("first", f"{__name__}:Versioned", group),
        ]

    monkeypatch.setattr(task_providers, "entry_points", find)


@pytest.mark.usefixtures("entry_points")
def test_providers_are_sorted_by_name() -> None:
    found_providers: list[Any] = list(task_providers.providers())
    assert [provider.__name__ for provider in found_providers] == ["Versioned", "Plain"]


@pytest.mark.usefixtures("entry_points")
def test_datasets_record_the_versions_of_a_familys_packages() -> None:
    assert task_providers.packages() == ["typer", "not-installed"]
    versions = installed_versions()
    assert "typer" in versions
    assert "not-installed" not in versions
    assert "pettingzoo" not in versions


def test_the_built_in_families_name_their_packages() -> None:
    assert {"pettingzoo", "mpe2", "dm-meltingpot"} <= set(task_providers.packages())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("task", "advice"),
    [
        ("./race.py:Race", "Name the module, not its file: race:Race."),
        ("race.py:Race", "Name the module, not its file: race:Race."),
        ("tasks/race.py:Race", "Name the module, not its file: tasks.race:Race."),
        (
            "/far/race.py:Race",
            "not its file: race:Race in its folder.",
        ),
        (".race:Race", "a module's name does not begin with a dot."),
    ],
)
def test_files_and_relative_names_of_modules_are_refused_with_advice(
    task: str, advice: str
) -> None:
    with pytest.raises(ValueError, match="must be module:name") as error:
        task_providers.find_callable(task)
    assert str(error.value).endswith(advice)
