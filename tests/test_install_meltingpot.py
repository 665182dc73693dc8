"""Installation: the archive for MeltingPot's build, and the progress that is shown."""

import argparse
import subprocess
import sys
import tarfile
from pathlib import Path

import install_meltingpot as script
import pytest
from run_pip import PipLog

ROOT = Path(__file__).resolve().parents[1]


def options(*, assets: Path | None = None, none: bool = False) -> argparse.Namespace:
    return argparse.Namespace(assets=assets, no_assets=none, deadline=10.0)


def write_archive(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return path


def members(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return archive.getnames()


def test_an_archive_that_can_be_fetched_reaches_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_archive(tmp_path / "source.tar.gz", "assets/saved_models/bot")
    monkeypatch.setattr(script, "URL", source.as_uri())

    assert script._provide(tmp_path / script.ARCHIVE, options())
    assert members(tmp_path / script.ARCHIVE) == ["assets/saved_models/bot"]


@pytest.mark.parametrize("source", ["missing", "not an archive", "without assets"])
def test_without_a_usable_archive_the_build_gets_an_empty_folder(
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "source.tar.gz"
    if source == "not an archive":
        path.write_text("<html>Sign in to this network</html>")
    elif source == "without assets":
        write_archive(path, "other/file")
    monkeypatch.setattr(script, "URL", path.as_uri())

    assert not script._provide(tmp_path / script.ARCHIVE, options())
    assert members(tmp_path / script.ARCHIVE) == ["assets"]
    assert "cannot be had" in capsys.readouterr().err


def test_an_archive_fetched_beforehand_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "URL", "file:///nowhere")
    source = write_archive(tmp_path / "mine.tar.gz", "assets/x")

    assert script._provide(tmp_path / script.ARCHIVE, options(assets=source))
    assert members(tmp_path / script.ARCHIVE) == ["assets/x"]


def test_the_installed_version_is_the_one_in_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert f"dm-meltingpot=={script.VERSION}" in lines


def test_the_download_shows_total_rate_and_time_left() -> None:
    assert script._amount(300_000_000, 900_000_000, 10.0) == (
        "300 of 900 MB, 30.0 MB/s, 0:20 left"
    )
    assert script._amount(300_000_000, 0, 10.0) == "300 MB, 30.0 MB/s"


def test_the_progress_of_pip_counts_packages_and_megabytes() -> None:
    log = PipLog()
    assert log.text() == "step 1 of 2: 0 packages, 0 MB: pip starts"
    for line in (
        "Obtaining file:///checkout",
        "  Preparing metadata (pyproject.toml): finished with status 'done'",
        "Collecting torch>=2.8 (from marl-collect==0.1.0)",
        "  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (180.4 MB)",
        "Requirement already satisfied: pip in ./lib",
        "Collecting gymnasium (from marl-collect==0.1.0)",
        "  Using cached gymnasium-1.4.0-py3-none-any.whl (965 kB)",
    ):
        log.add(line + "\n")
    assert log.text() == "step 1 of 2: 4 packages, 181 MB: gymnasium, 965 kB"
    log.add("  Building wheel for mpe2 (pyproject.toml): started\n")
    assert log.text().endswith("building mpe2")
    log.add("Installing collected packages: torch, gymnasium, marl-collect\n")
    assert log.text() == "step 2 of 2: installing 3 packages, 181 MB"
    assert log.summary() == "3 packages installed"


def test_the_log_of_pip_is_shown_if_it_fails() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "run_pip.py"), "install"]
    command += ["--no-index", "--no-deps"]
    fine = subprocess.run([*command, "numpy"], capture_output=True, text=True)
    assert (fine.returncode, fine.stdout) == (0, "")
    assert len(fine.stderr.splitlines()) == 1
    wrong = subprocess.run(
        [*command, "no-such-package"], capture_output=True, text=True
    )
    assert wrong.returncode == 1
    assert "No matching distribution found for no-such-package" in wrong.stderr
    assert "Traceback" not in wrong.stderr
