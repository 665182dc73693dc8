"""A newcomer's first hour: the quickstart and every command at 80 columns, notebooks.

What the commands print is compared with what the pages show.
"""

import contextlib
import re
from pathlib import Path

import cli_reference
import pytest
from support.scripts import run_python
from typer.testing import CliRunner

from marl_collect.cli.main import app

pytestmark = pytest.mark.processes

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


SHOWN = cli_reference.shown(cli_reference.PAGE.read_text(encoding="utf-8"))


def test_the_reference_shows_an_example_of_each_command() -> None:
    commands = {str(c.name or c.callback.__name__) for c in app.registered_commands}
    assert set(SHOWN) == set(cli_reference.EXAMPLES) == commands - {"import"}


class Examples:
    """Runs the examples of the reference in their order, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._printed: dict[str, str] = {}

    def printed(self, name: str) -> str:
        """Return what an example prints; those before it run first."""
        for earlier in cli_reference.EXAMPLES:
            if name in self._printed:
                break
            if earlier not in self._printed:
                with contextlib.chdir(self._folder):
                    self._printed[earlier] = cli_reference.run_example(earlier)
        return self._printed[name]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    for name in ("mpe2", "Box2D", "torchrl", "minari", "imageio_ffmpeg", "matplotlib"):
        pytest.importorskip(name, reason="needs the extras of every command")
    return Examples(tmp_path_factory.mktemp("examples"))


@pytest.mark.xdist_group("cli_reference")  # Later ones read what earlier ones write.
@pytest.mark.parametrize("name", cli_reference.EXAMPLES)
def test_a_command_prints_what_the_reference_shows(
    name: str, examples: Examples
) -> None:
    text = examples.printed(name)
    assert text
    assert [line for line in text.splitlines() if len(line) > 80] == []
    actual, expected = comparable(text), comparable(SHOWN[name])
    if name == "compare":  # How its tables are split depends on the numbers.
        actual = " ".join(sorted(set(actual.split())))
        expected = " ".join(sorted(set(expected.split())))
    assert actual == expected, f"{name}: `python scripts/cli_reference.py`?"


def test_the_commands_of_the_quickstart_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 4
    printed = comparable("\n".join(run(command.split()) for command in COMMANDS))
    outputs = re.findall(r"```text\n(.*?)```", QUICKSTART, re.DOTALL)
    assert outputs
    for text in outputs:
        assert comparable(text) in printed
    assert "Mean return of N episodes" in printed
    assert "mpe/simple_spread_vN" in printed


def test_help_fits_into_80_columns() -> None:
    names = [str(c.name or c.callback.__name__) for c in app.registered_commands]
    for name in names:
        assert "Usage: " in run([name, "--help"])


def test_the_notebooks_have_the_text_of_their_pages() -> None:
    process = run_python(ROOT / "scripts" / "make_notebooks.py", "--check")
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_citation_has_the_version_of_the_package() -> None:
    import marl_collect

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {marl_collect.__version__}\n" in text
