"""Adding an export format takes one exporter and one entry in the table of formats."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from marl_collect import record
from marl_collect.cli.main import app
from marl_collect.storage import export_formats as formats
from marl_collect.testing.counting import CountingEnv


def export_lengths(source, path, *, indent=None):
    """Write the length of each episode as JSON."""
    path.mkdir()
    file = path / "lengths.json"
    file.write_text(json.dumps(source.lengths.tolist(), indent=indent))
    return file


@pytest.fixture
def lengths(monkeypatch):
    entry = formats.ExportFormat("lengths as JSON", f"{__name__}:export_lengths")
    monkeypatch.setitem(formats.FORMATS, "lengths", entry)


@pytest.mark.usefixtures("lengths")
def test_a_new_format_is_available_to_python_and_the_command_line(tmp_path: Path):
    dataset = record(tmp_path / "d", CountingEnv, episodes=3, seed=0)
    expected = dataset.trajectories.lengths.tolist()
    file = formats.export(dataset.trajectories, tmp_path / "a", "lengths")
    assert json.loads(file.read_text()) == expected
    command = ["export", str(tmp_path / "d"), str(tmp_path / "b")]
    command += ["--format", "lengths", "--option", "indent=2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "b" / "lengths.json").read_text()
    assert text == json.dumps(expected, indent=2)


@pytest.mark.usefixtures("lengths")
def test_unknown_formats_and_settings_are_named(tmp_path: Path):
    dataset = record(tmp_path / "d", CountingEnv, episodes=1)
    with pytest.raises(ValueError, match="'csv' is not an export format: use one of"):
        formats.export(dataset, tmp_path / "a", "csv")
    with pytest.raises(ValueError, match="lengths has no setting 'level': use indent"):
        formats.export(dataset, tmp_path / "a", "lengths", level=3)
    with pytest.raises(ValueError, match="must be one of gzip, lzf, szip, none"):
        formats.export(dataset, tmp_path / "a", compression="zip")
    assert not (tmp_path / "a").exists()
