"""`make check`: stops at the first failure, and checks an unchanged tree once."""

import subprocess
import sys
from pathlib import Path

import check
import pytest

pytestmark = pytest.mark.processes

MAKEFILE = """
%:
\t@echo $@ >> log; test ! -e fail-$@
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose targets only log that they were made."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / ".gitignore").write_text("log\n")
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    monkeypatch.setattr(check, "ROOT", folder)
    monkeypatch.setattr(check, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(sys, "argv", ["check.py"])
    return folder


def made(checkout: Path) -> list[str]:
    """Return the targets made since the last call."""
    log = checkout / "log"
    targets = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return targets


def test_a_tree_that_passed_is_not_checked_again(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check.main() == 0
    assert made(checkout) == list(check.STEPS)
    assert check.main() == 0
    assert made(checkout) == []
    assert "passed before" in capfd.readouterr().out


@pytest.mark.parametrize("file", ["Makefile", "untracked.py"])
def test_a_changed_tree_is_checked_again(checkout: Path, file: str) -> None:
    assert check.main() == 0
    made(checkout)
    with (checkout / file).open("a") as stream:
        stream.write("# a change\n")
    assert check.main() == 0
    assert made(checkout) == list(check.STEPS)


def test_other_packages_are_checked_again(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check.main() == 0
    made(checkout)
    monkeypatch.setattr(check, "packages_hash", lambda: "others")
    assert check.main() == 0
    assert made(checkout) == list(check.STEPS)


def test_it_stops_at_the_first_failure_and_leaves_no_stamp(checkout: Path) -> None:
    assert check.main() == 0
    made(checkout)
    (checkout / "fail-typecheck").touch()
    assert check.main() != 0
    targets = made(checkout)
    assert targets == list(check.STEPS[: check.STEPS.index("typecheck") + 1])
    assert not check.STAMP.exists()


def test_the_hash_leaves_the_repository_as_it_is(checkout: Path) -> None:
    (checkout / "untracked.py").write_text("a = 1\n")
    files = sorted(checkout.glob(".git/**/*"))
    check.tree_hash()
    assert sorted(checkout.glob(".git/**/*")) == files


def test_every_step_is_a_target_and_the_ci_script_runs_them() -> None:
    root = Path(__file__).parents[1]
    makefile = (root / "Makefile").read_text()
    for step in check.STEPS:
        assert f"\n{step}: " in makefile
    assert "make check" in (root / ".ci" / "run").read_text()
