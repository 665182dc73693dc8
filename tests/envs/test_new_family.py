"""The recipe in docs/environments.md: a new family is a folder and a registry entry."""

import re
from pathlib import Path

import pytest
from support.scripts import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "environments.md").read_text()
TUTORIAL = (DOCS / "tutorials" / "own_environment.md").read_text()
RECIPE = PAGE.partition("## Recipe: an environment family")[2].partition("\n## ")[0]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Write the files of the recipe, as installing its package would."""
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    files = dict(
        re.findall(r"`(\w+/\w+\.py)`:\n\n.*?```python\n(.*?)```", RECIPE, re.S)
    )
    entry = re.search(r"```toml\n\[project\.entry-points\.(.*?)```", RECIPE, re.S)
    assert entry is not None
    assert sum(text.count("\n") for text in files.values()) <= 20
    (world,) = re.findall(r"```python\n([^`]*class Race\(.*?)```", TUTORIAL, re.S)
    files["gridline/world.py"] = world
    (tmp_path / "gridline").mkdir()
    (tmp_path / "gridline" / "__init__.py").touch()
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    info = tmp_path / "gridline-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: gridline\nVersion: 1.0\n")
    lines = "[" + entry[1].replace('"', "")
    (info / "entry_points.txt").write_text(lines)
    return tmp_path


def test_a_new_family_is_listed_found_and_passes_check_env(installed: Path) -> None:
    code = """
from typer.testing import CliRunner
from marl_collect import check_env
from marl_collect.cli.main import app
from marl_collect.cli.tasks import available_tasks, find_factory
assert available_tasks()["gridline/race"] == ""
for name in ("race", "gridline/race"):
    check_env(find_factory(name, {"goal": 4}), episodes=2)
try:
    find_factory("gridline/rac", {})
except ValueError as error:
    print(error)
done = CliRunner().invoke(app, ["info", "gridline/race"])
assert done.exit_code == 0, done.output
assert "gridline/race" in done.output
"""
    paths = f"{installed}:{ROOT}"
    process = run_python("-c", code, env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"})
    assert process.returncode == 0, process.stderr
    assert "Did you mean gridline/race" in process.stdout
