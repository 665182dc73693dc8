"""Scripts: the table of the package's size, and the archive for MeltingPot's build."""

import argparse
import tarfile
from pathlib import Path

import install_meltingpot as script
import pytest
import size

EXAMPLE = '''"""A docstring."""

# A comment.
import os  # Counted once.


class A:
    """Another docstring,
    of two lines."""

    x: int = 0
    """The docstring of an attribute."""

    class B:
        text = """a
        # no comment

        """


def f(
    a,
):
    ...
'''


LOOSE = {"envs", "models", "single modules"}


def test_code_lines_are_counted_without_blanks_comments_and_docstrings() -> None:
    # import, class A, x, class B, four lines of text, four of f.
    assert size.size(EXAMPLE) == (1, 2, 12)


def test_the_table_has_a_row_for_every_room(capsys: pytest.CaptureFixture[str]) -> None:
    size.main([])
    rows = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.split("\n")
    ]
    sizes = {row[0]: row[1:] for row in rows[2:] if len(row) > 1}
    package = size.ROOT / "marl_collect"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert sizes.keys() == rooms | LOOSE | {"engine", "package"}
    files = len(list((size.ROOT / "envs").rglob("*.py")))
    assert sizes["envs"][0] == str(files)
    numbers = {
        name: [int(n.replace(",", "")) for n in row] for name, row in sizes.items()
    }
    for name, parts in (("engine", size.ENGINE), ("package", rooms | LOOSE)):
        columns = zip(*(numbers[part] for part in parts), strict=True)
        assert numbers[name] == [sum(column) for column in columns]


ROOT = Path(__file__).resolve().parents[1]


def options(*, assets: Path | None = None, none: bool = False) -> argparse.Namespace:
    return argparse.Namespace(assets=assets, no_assets=none)


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
