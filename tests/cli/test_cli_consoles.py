"""Nothing that a command prints from a file controls the terminal."""

import json
import os
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from support.datasets import record_here
from support.runs import write_run
from typer.testing import CliRunner
from workloads.counting import CountingEnv

from marl_collect.cli.consoles import SafeConsole, fail, out
from marl_collect.cli.main import app

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


def test_a_run_s_task_is_printed_without_control_characters(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints").mkdir(parents=True)
    (run_folder / "checkpoints" / "best.pt").touch()
    for task in (EVERY, f"os:{EVERY}"):
        config = {"task": task, "env_kwargs": {}, "options": {}}
        (run_folder / "config.json").write_text(json.dumps(config))
        assert ESCAPED in run("play", run_folder, "--policy=random")


def test_a_report_has_no_control_characters(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_folder = write_run(tmp_path)
    config = json.loads((run_folder.path / "config.json").read_text())
    title = ATTACKS["title"]
    config |= {"setup": title, "task": title}
    config["options"] |= {"eval_episodes": 2, "eval_interval": 100}
    config["options"] |= {"final_episodes": 2, "deterministic": True}
    run_folder.write_json("config.json", config)
    assert r"\x1b]0;owned\x07" in run("compare", "--report", tmp_path)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_whatever_is_printed_is_escaped(
    attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
