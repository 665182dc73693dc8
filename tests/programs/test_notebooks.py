"""HTML tables for notebooks are correct and escaped."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from workloads.counting import CountingEnv

from marl_collect import Collector, record
from marl_collect.programs import notebooks


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
