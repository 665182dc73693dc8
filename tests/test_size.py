"""The table of the package's size counts what it says."""

from pathlib import PurePath

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


def test_code_lines_are_counted_without_blanks_comments_and_docstrings() -> None:
    # import, class A, x, class B, four lines of text, four of f.
    assert size.size(EXAMPLE) == (1, 2, 12)


def test_files_are_added_up_by_room() -> None:
    names = [
        "marl_collect/core/a.py",
        "marl_collect/core/deeper/b.py",
        "marl_collect/errors.py",
        "marl_collect/cli/c.py",
        "envs/d.py",
    ]
    rooms = size.by_room((PurePath(name), "x = 0\n\ny = 0\n") for name in names)
    assert rooms == {
        "core": (2, 0, 4),
        "single modules": (1, 0, 2),
        "cli": (1, 0, 2),
        "envs": (1, 0, 2),
        "engine": (3, 0, 6),
        "package": (5, 0, 10),
    }


def test_the_table_has_a_row_for_every_room(capsys: pytest.CaptureFixture[str]) -> None:
    size.main([])
    rows = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.split("\n")
    ]
    sizes = {row[0]: row[1:] for row in rows[2:] if len(row) > 1}
    folders = [folder for folder in size.FOLDERS if folder != "marl_collect"]
    package = size.ROOT / "marl_collect"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert sizes.keys() == rooms | {*folders, "single modules", "engine", "package"}
    files = len(list((size.ROOT / "envs").rglob("*.py")))
    assert sizes["envs"][0] == str(files)
