"""A newcomer's first hour: the quickstart and every command at 80 columns, notebooks.

What the commands print is compared with what the pages show.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from marl_collect.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^marl-collect ([^#\n]+)", QUICKSTART, re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,.]*")


def run(arguments: list[str]) -> str:
    """Run a command in a terminal of 80 columns and return what it prints."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.stdout + done.stderr
    wide = [line for line in done.stdout.splitlines() if len(line.rstrip()) > 80]
    assert not wide
    return done.stdout


def comparable(text: str) -> str:
    """Return the text without what varies.

    That is: numbers, the width of columns, the bins of histograms, and which versions
    of which packages are installed.
    """
    text = re.sub(r"[\u2500-\u259f]", " ", text)  # Lines of tables, and bars.
    text = re.sub(r"\s+", " ", NUMBER.sub("N", text)).strip()
    text = re.sub(r"versions: .*? Groups", "versions: Groups", text)
    return re.sub(r"(N to N (N )?)+", "N to N ", text)


def load_script(name: str):
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_command_prints_what_the_reference_shows():
    for name in ("mpe2", "Box2D", "torchrl", "h5py", "imageio_ffmpeg", "matplotlib"):
        pytest.importorskip(name, reason="needs the extras of every command")
    script = load_script("cli_reference")
    shown = script.shown(script.PAGE.read_text(encoding="utf-8"))
    commands = {str(c.name or c.callback.__name__) for c in app.registered_commands}
    assert set(shown) == set(script.EXAMPLES) == commands
    printed = script.run_examples()
    for name, text in printed.items():
        assert text
        assert [line for line in text.splitlines() if len(line) > 80] == []
        found, expected = comparable(text), comparable(shown[name])
        if name == "compare":  # How its tables are split depends on the numbers.
            found, expected = sorted(set(found.split())), sorted(set(expected.split()))
        assert found == expected, f"{name}: `python scripts/cli_reference.py`?"


def test_the_commands_of_the_quickstart_print_what_it_shows(tmp_path, monkeypatch):
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 4
    printed = comparable("\n".join(run(command.split()) for command in COMMANDS))
    shown = re.findall(r"```text\n(.*?)```", QUICKSTART, re.DOTALL)
    assert shown
    for text in shown:
        assert comparable(text) in printed
    assert "Mean return of N episodes" in printed
    assert "mpe/simple_spread_vN" in printed


def test_help_fits_into_80_columns():
    names = [str(c.name or c.callback.__name__) for c in app.registered_commands]
    for name in names:
        if name != "bench":  # Its help is argparse's.
            assert "Usage: " in run([name, "--help"])


def test_the_notebooks_have_the_text_of_their_pages():
    script = ROOT / "scripts" / "make_notebooks.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["quickstart", "own_environment", "evaluate"])
def test_the_cells_of_a_notebook_run_in_order(name, tmp_path, monkeypatch):
    for package in ("mpe2", "Box2D", "torchrl", "imageio_ffmpeg"):
        pytest.importorskip(package, reason="needs the extras of the notebooks")
    path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    cells = content["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    links = "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#:]+)\)", links):
        assert (path.parent / target).exists(), target
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    for cell in code:
        text = "".join(cell["source"]).replace("frames = 8_000", "frames = 1_000")
        exec(compile(text, f"{name}, cell {cell['id']}", "exec"), space)


def test_the_citation_has_the_version_of_the_package():
    import marl_collect

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {marl_collect.__version__}\n" in text
