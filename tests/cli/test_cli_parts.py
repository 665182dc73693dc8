"""Unit tests of the command line's parts."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from workloads.counting import CountingEnv

from marl_collect.cli.collecting import batch_frames, free_folder
from marl_collect.cli.consoles import err, fail, out
from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.progress import ProgressDisplay, remaining, returns_line
from marl_collect.cli.tasks import parse_settings
from marl_collect.models import make_policy, save_policy
from marl_collect.storage import EndedEpisode


@pytest.mark.parametrize(
    ("frames", "workers", "per_worker", "asked", "expected"),
    [
        (20_000, 2, 1, None, 2000),
        (5000, 2, 1, None, 1668),  # Three of these are 5004.
        (100, 1, 1, None, 100),
        (100, 3, 2, None, 102),
        (100, 3, 2, 10, 12),
        (100, 1, 1, 500, 100),
    ],
)
def test_batches_are_equal_and_barely_exceed_the_requested_frames(
    frames: int, workers: int, per_worker: int, asked: Any, expected: int
) -> None:
    assert batch_frames(frames, workers * per_worker, asked) == expected


def test_settings_are_json_or_text() -> None:
    settings = ["n=3", "x=0.5", "on=true", "off=False", 'o=["RGB"]', "name=a=b", "e="]
    assert parse_settings(settings) == {
        "n": 3,
        "x": 0.5,
        "on": True,
        "off": False,
        "o": ["RGB"],
        "name": "a=b",
        "e": "",
    }


def test_free_folder_returns_the_first_unused_number(tmp_path: Path) -> None:
    assert free_folder(tmp_path, "sisl/multiwalker_v9").name == "multiwalker_v9-1"
    (tmp_path / "multiwalker_v9-1").mkdir()
    assert free_folder(tmp_path, "multiwalker_v9").name == "multiwalker_v9-2"
    assert free_folder(tmp_path, "my.module:make").name == "my.module-make-1"


def test_the_returns_line_shows_the_team_and_each_agent() -> None:
    def episode(*returns: float) -> EndedEpisode:
        return EndedEpisode(0, 4, terminated=True, returns={"g": returns})

    line = returns_line([episode(1.0, 2.0), episode(3.0, 4.0)])
    assert line == "mean return of the last 2 episodes: team 5.00 · g 2.00 3.00"
    line = returns_line([episode(*range(8))])
    assert line.endswith("· g 0.00 1.00 2.00 3.00 4.00 5.00 6.00 7.00")
    line = returns_line([episode(*range(9))])
    assert line.endswith("team 36.00 · g 4.00 per agent")


def test_the_progress_fits_into_80_columns_and_shows_the_time_left() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    display = ProgressDisplay("a_long_name_v3" * 5, 10**8)
    frames = 0
    display.count(lambda: frames)
    screens = []
    for frames in (0, 25_000_000):  # noqa: B007 - read by the display
        with console.capture() as captured:
            console.print(display)
        screens.append(captured.get())
    assert "-:-- left" in screens[0]
    assert "25,000,000/100,000,000 frames" in screens[1]
    assert "0:00 left" in screens[1]
    assert all(len(Text.from_ansi(line)) <= 80 for line in screens[1].splitlines())


def test_a_conversion_shows_its_progress_in_80_columns() -> None:
    console = Console(width=80, force_terminal=True)
    display = ProgressDisplay("import " + "x" * 90, 0)
    display.convert(0, 400, ())
    with console.capture() as captured:
        console.print(display)
    assert "0/400 frames" in captured.get()
    display.convert(100, 400, [EndedEpisode(0, 100, True, {"g": (1.5,)})])
    with console.capture() as captured:
        console.print(display)
    text = Text.from_ansi(captured.get()).plain
    assert re.search(r"100/400 frames +[\d,]+ frames/s +0:0\d left", text)
    assert "mean return of the last 1 episode: team 1.50" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_speed_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at least five seconds: from the last time that is as long ago, or longer."""
    frames, now = 0, 100.0
    monkeypatch.setattr("marl_collect.cli.progress.time.monotonic", lambda: now)
    console = Console(width=80, force_terminal=True)
    display = ProgressDisplay("t", 10_000)
    display.count(lambda: frames)
    speeds = []
    for seconds, added in ((1, 0), *[(1, 100)] * 10, *[(1, 10)] * 6, (60, 600)):
        now, frames = now + seconds, frames + added
        with console.capture() as captured:
            console.print(display)
        match = re.search(r"([\d,]+) frames/s", Text.from_ansi(captured.get()).plain)
        assert match is not None
        speeds.append(int(match[1]))
    assert speeds == [0, *[100] * 10, 85, 70, 55, 40, 25, 10, 10]


def test_the_time_left_follows_from_the_mean_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames, now = 0, 100.0
    monkeypatch.setattr("marl_collect.cli.progress.time.monotonic", lambda: now)
    console = Console(width=80, force_terminal=True)
    display = ProgressDisplay("t", 1000)
    display.count(lambda: frames)
    left = []
    for seconds, added in ((0, 0), (10, 250), (5, 250), (5, 500)):
        now, frames = now + seconds, frames + added
        with console.capture() as captured:
            console.print(display)
        left += re.findall(r"(\S+) left", Text.from_ansi(captured.get()).plain)
    assert left == ["-:--", "0:30", "0:15", "0:00"]


def test_remaining_time_is_readable() -> None:
    assert [remaining(s) for s in (None, 5, 65, 3725)] == [
        "-:--",
        "0:05",
        "1:05",
        "1:02:05",
    ]


def test_a_checkpoint_that_does_not_fit_the_options_is_refused(tmp_path: Path) -> None:
    description = CountingEnv().description
    path = tmp_path / "weights.pt"

    def request(**options: bool) -> PolicyRequest:
        settings = {"centralised": False, "share_params": True} | options
        return PolicyRequest(str(path), seed=0, **settings)

    policy = make_policy(description)
    torch.save(policy.state_dict(), path)
    loaded = request().build(description)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, policy.state_dict()[name])
    with pytest.raises(ValueError, match="does not fit the policy that --centralised"):
        request(share_params=False).build(description)
    save_policy(path, policy, description)
    assert request().build(description) is not None
    with pytest.raises(ValueError, match="--no-share-params: .* is that of .*weights"):
        request(share_params=False).build(description)
    path.write_text("not weights")
    with pytest.raises(ValueError, match=r"holds no tensors: .* save_policy"):
        request().build(description)


@pytest.mark.parametrize("source", ["random", "."])
def test_options_of_networks_need_a_policy_that_has_them(source: str) -> None:
    PolicyRequest(source, centralised=False, share_params=True, seed=0).check()
    with pytest.raises(ValueError, match="--centralised: .* Omit them"):
        PolicyRequest(source, centralised=True, share_params=True, seed=0).check()
    with pytest.raises(ValueError, match="--no-share-params: .* Omit them"):
        PolicyRequest(source, centralised=False, share_params=False, seed=0).check()


def test_names_are_neither_markup_nor_pictures() -> None:
    with out.capture() as printed:
        out.print(Table("[bold]setup", title="[red]/[/x]:one: returns"))
    assert "[red]/[/x]:one" in printed.get()
    assert "[bold]setup" in printed.get()
    with err.capture() as printed:
        fail("[/x] is wrong")
    assert "error: [/x] is wrong" in printed.get()
    console = Console(file=io.StringIO(), force_terminal=True)
    display = ProgressDisplay("[/x]:one:", 1, "frames")
    display.say("starting")
    with console.capture() as printed:
        console.print(display)
    assert "[/x]:one:: starting" in printed.get()
