"""The README's script runs as it stands, and its commands and links exist."""

import re
import tomllib
from pathlib import Path

import pytest
from support.scripts import run_python
from typer.testing import CliRunner

from marl_collect.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.processes
def test_the_script_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    pytest.importorskip("torchrl", reason="needs the extra torchrl")
    (script,) = blocks("python")
    (tmp_path / "script.py").write_text(script)
    process = run_python("script.py", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("torch.Size([4, 250])") == 20
    returns = re.findall(r"^([a-z ]+) (-\d+\.\d+)$", process.stdout, re.MULTILINE)
    means = {name: float(mean) for name, mean in returns}
    # Three seeds were 12 to 15 better.
    assert means["trained"] > means["random actions"] + 8


def test_it_opens_with_how_to_install_and_tables_are_narrow() -> None:
    first = next(line for line in README.splitlines() if line.startswith("pip "))
    pictures = [README.index(f"{name})") for name in ("walkers.gif", "speed.png")]
    places = [README.index(first), *pictures, README.index("```python")]
    assert places == sorted(places)
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert max(row.count("|") - 1 for row in rows) <= 5
    (script,) = blocks("python")
    assert len([line for line in script.splitlines() if line.strip()]) <= 17


def test_its_table_uses_the_words_of_its_chart() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    from reporting.chart import COLOURS

    heads = [line for line in README.splitlines() if line.startswith("| times as fast")]
    for name in set(COLOURS) - {"marl_collect", "PufferLib"}:
        assert f" {name} |" in heads[0]


def test_its_commands_exist() -> None:
    commands = re.findall(r"^(make \w+|marl-collect \w+)", README, re.MULTILINE)
    assert len(commands) >= 6
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        tool, name = command.split()
        if tool == "make":
            assert name in targets
        else:
            assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_its_table_has_every_extra() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    section = README[README.index("| extra | installs |") : README.index("## More")]
    firsts = [line.split("|")[1] for line in section.splitlines() if line[:3] == "| `"]
    assert set(re.findall(r"`(\w+)`", " ".join(firsts))) == set(extras) - {"dev"}
