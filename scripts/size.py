"""Prints the files, classes and code lines of each room of the package.

Code lines hold code: they are not blank, and not only a comment or a docstring.

    python scripts/size.py              # the working tree
    python scripts/size.py v1.0 HEAD    # two commits, side by side
"""

import argparse
import ast
import io
import shutil
import subprocess
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("marl_collect", "envs", "models")
ENGINE = {
    *("core", "processes", "buffers", "weights", "rollout"),
    *("parallel_env", "collectors", "distributed", "single modules"),
}
"""Rooms that the row ``engine`` adds up."""
Size = tuple[int, int, int]
"""Numbers of files, classes and code lines."""


def size(text: str) -> Size:
    """Count the classes and code lines of one file."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.string.strip() and token.type != tokenize.COMMENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    classes = 0
    for node in ast.walk(ast.parse(text)):
        classes += isinstance(node, ast.ClassDef)
        match node:
            case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=int(last)):
                lines -= {*range(first, last + 1)}
    return 1, classes, len(lines)


def read(commit: str | None) -> Iterable[tuple[PurePath, str]]:
    """Read the package's files of a commit, or as they are now."""
    with tempfile.TemporaryDirectory() as folder:
        root = ROOT if commit is None else Path(folder)
        if commit is not None:
            command = ["git", "archive", "--output", f"{folder}/files.tar", commit]
            subprocess.run([*command, *FOLDERS], cwd=ROOT, check=True)
            shutil.unpack_archive(f"{folder}/files.tar", folder, filter="data")
        for path in (p for name in FOLDERS for p in (root / name).rglob("*.py")):
            yield path.relative_to(root), path.read_text(encoding="utf-8")


def by_room(files: Iterable[tuple[PurePath, str]]) -> dict[str, Size]:
    """Add up the files of every room, of the engine and of the package."""
    sizes: defaultdict[str, Size] = defaultdict(lambda: (0, 0, 0))
    for path, text in files:
        parts = path.parts[path.parts[0] == "marl_collect" :]
        room = parts[0] if len(parts) > 1 else "single modules"
        engine = ["engine"] if room in ENGINE else []
        numbers = size(text)
        for row in (room, *engine, "package"):
            a, b, c = (x + y for x, y in zip(sizes[row], numbers, strict=True))
            sizes[row] = a, b, c
    return sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description="Print the size of the package.")
    parser.add_argument("commits", nargs="*", help="default: the working tree")
    commits = parser.parse_args(arguments).commits or [None]
    columns = [by_room(read(commit)) for commit in commits]
    totals = ["engine", "package"]
    rooms = sorted({row for column in columns for row in column} - {*totals})
    print("| room |" + " files | classes | code lines |" * len(columns))
    print("|---|" + "--:|" * 3 * len(columns))
    for row in rooms + totals:
        cells = [f"{n:,}" for column in columns for n in column[row]]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
