"""A newcomer's first hour: the quickstart and every command at 80 columns, notebooks.

What the commands of the quickstart print is compared with what it shows.
"""

import re
from pathlib import Path

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


EXAMPLES = """
envs simple
info simple_spread_v3
collect simple_spread_v3 --episodes 5 --policy random --seed 0 --out data
inspect data
view data --save best.html --episode 0
copy data copied
export data --format minari --out spread-v0
play simple_spread_v3 --episodes 3
render simple_spread_v3 --out spread.gif --max-frames-per-traj 10
compare simple_spread_v3 --setup ippo-local-shared --setup mappo-local-own --frames 400\
 --seeds 2 --workers 1 --jobs 1 --set frames_per_batch=200 --set eval_interval=200\
 --set eval_episodes=4 --set final_episodes=4 --out spread
""".strip().splitlines()
"""One of each command but ``import``, which needs a vault."""


@pytest.mark.usefixtures("here")
def test_an_example_of_each_command_runs_at_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("mpe2", "Box2D", "torchrl", "minari", "imageio_ffmpeg", "matplotlib"):
        pytest.importorskip(name, reason="needs the extras of every command")
    commands = {str(c.name or c.callback.__name__) for c in app.registered_commands}
    assert {example.split()[0] for example in EXAMPLES} == commands - {"import"}
    monkeypatch.setenv("MINARI_DATASETS_PATH", "minari")
    for example in EXAMPLES:
        assert run(example.split()).strip()


@pytest.mark.usefixtures("here")
def test_the_commands_of_the_quickstart_print_what_it_shows() -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
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
