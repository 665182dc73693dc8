"""Parts of the command line; what it prints from a file never controls the terminal."""

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from support.datasets import record_here
from typer.testing import CliRunner
from workloads.counting import CountingEnv

from marl_collect import cli
from marl_collect.cli.collecting import batch_frames, free_folder
from marl_collect.cli.consoles import SafeConsole, err, fail, out
from marl_collect.cli.main import app
from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.progress import ProgressDisplay, remaining, returns_line
from marl_collect.cli.tasks import parse_settings
from marl_collect.models import make_policy, save_policy
from marl_collect.storage import EndedEpisode

ATTACKS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "title": "\x1b]0;owned\x07",
    "c1": "\x9d52;c;eA==\x9c\x9b2J",
    "bidi": "\u202egpj.exe\u202c\u2066x\u2069",
    "erase": "\x1b[2K\r\x08\x7f",
}
EVERY = " ".join(ATTACKS.values())
ESCAPED = r"\x1b]52;c;cm0gLXJmIH4=\x07 \x1b]0;owned\x07 \x9d52;c;eA==\x9c"


def run(*arguments: str | Path) -> str:
    """Run a command; return what it prints, whose only controls are its own lines."""
    result = CliRunner().invoke(
        app, list(map(str, arguments)), env={"COLUMNS": "1000", "TERM": "xterm"}
    )
    assert result.exception is None or isinstance(result.exception, SystemExit)
    text = result.stdout + result.stderr
    assert all(c.isprintable() or c == "\n" for c in text), repr(text)
    return text


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    settings = {EVERY: EVERY, "list": [EVERY]}
    record_here(folder, CountingEnv, episodes=2, task=EVERY, env_kwargs=settings)
    return folder


def without_spaces(text: str) -> str:
    """Return the text as it is before lines are broken at the terminal's width."""
    return "".join(text.split())


def test_inspect_prints_no_control_characters_of_a_dataset(data: Path) -> None:
    text = without_spaces(run("inspect", data, "--keys"))
    assert without_spaces(ESCAPED) in text


def test_errors_print_no_control_characters(tmp_path: Path) -> None:
    folder = tmp_path / EVERY
    folder.mkdir()
    for command in ("inspect", "view", "play"):
        assert ESCAPED in run(command, folder)


def test_commands_print_on_these_consoles_only() -> None:
    others = re.compile(r"(?<!def )(?<![\w.])(?:print|Console)\(|sys\.std")
    for path in Path(cli.__file__).parent.rglob("*.py"):
        assert not others.findall(path.read_text("utf-8")), path


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_all_output_is_escaped(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(attack, title=attack, caption=attack)
    table.add_column(Text(attack))
    table.add_row(attack, Text.assemble((attack, "bold"), "y"))
    with out.capture() as printed:
        out.print(attack, Text(attack, "red"), table, soft_wrap=True)
    fail(attack)
    text = printed.get() + capsys.readouterr().err
    assert all(c.isprintable() or c == "\n" for c in text), repr(text)
    first = attack[0].encode("unicode_escape").decode()
    assert text.count(first) >= 7


def test_a_terminal_gets_colours_but_no_commands_of_a_text() -> None:
    console = SafeConsole(force_terminal=True, color_system="standard", width=300)
    with console.capture() as printed:
        console.print(Text.assemble(("error:", "bold red"), f" {EVERY}"))
        console.print(Text("plain", "red"))
    text = printed.get()
    assert "\x1b[31mplain\x1b[0m" in text
    assert "]52" in text
    assert "\x1b]" not in text
    assert "\x07" not in text


def test_a_name_that_is_not_text_can_be_printed(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b")
    assert r"\udcff\x1b" in run("inspect", name)


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


def drawn(display: ProgressDisplay) -> str:
    """Return what a terminal of 80 columns shows, without colours."""
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with console.capture() as captured:
        console.print(display)
    text = Text.from_ansi(captured.get()).plain
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_the_progress_fits_into_80_columns_and_shows_the_time_left() -> None:
    display = ProgressDisplay("a_long_name_v3" * 5, 10**8)
    frames = 0
    display.count(lambda: frames)
    assert "-:-- left" in drawn(display)
    frames = 25_000_000
    text = drawn(display)
    assert "25,000,000/100,000,000 frames" in text
    assert "0:00 left" in text
    frames = 10**8 + 50  # Batches are whole.
    assert "100,000,000/100,000,000 frames" in drawn(display)


def test_a_conversion_shows_its_progress_in_80_columns() -> None:
    display = ProgressDisplay("import " + "x" * 90, 0)
    display.convert(0, 400, ())
    assert "0/400 frames" in drawn(display)
    display.convert(100, 400, [EndedEpisode(0, 100, True, {"g": (1.5,)})])
    text = drawn(display)
    assert re.search(r"100/400 frames +[\d,]+ frames/s +0:0\d left", text)
    assert "mean return of the last 1 episode: team 1.50" in text


def test_the_speed_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at least five seconds: from the last time that is as long ago, or longer."""
    frames, now = 0, 100.0
    monkeypatch.setattr("marl_collect.cli.progress.time.monotonic", lambda: now)
    display = ProgressDisplay("t", 10_000)
    display.count(lambda: frames)
    speeds = []
    for seconds, added in ((1, 0), *[(1, 100)] * 10, *[(1, 10)] * 6, (60, 600)):
        now, frames = now + seconds, frames + added
        speeds += re.findall(r"([\d,]+) frames/s", drawn(display))
    assert list(map(int, speeds)) == [0, *[100] * 10, 85, 70, 55, 40, 25, 10, 10]


def test_the_time_left_is_of_the_mean_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, now = 0, 100.0
    monkeypatch.setattr("marl_collect.cli.progress.time.monotonic", lambda: now)
    display = ProgressDisplay("t", 1000)
    display.count(lambda: frames)
    left = []
    for seconds, added in ((0, 0), (10, 250), (5, 250), (5, 500)):
        now, frames = now + seconds, frames + added
        left += re.findall(r"(\S+) left", drawn(display))
    assert left == ["-:--", "0:30", "0:15", "0:00"]


def test_remaining_time_is_readable() -> None:
    shown = [remaining(s) for s in (None, 5, 65, 3725)]
    assert shown == ["-:--", "0:05", "1:05", "1:02:05"]


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
    display = ProgressDisplay("[/x]:one:", 1, "frames")
    display.say("starting")
    assert "[/x]:one:: starting" in drawn(display)
