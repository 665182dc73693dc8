"""Measures which one-line faults the tests detect, and prints a Markdown table.

    python scripts/mutations.py                # all of tests/mutations.toml
    python scripts/mutations.py storage/ ppo   # those whose file contains a word

Each fault is written to a copy of the commit, and its tests run until one fails or they
hang: those that its entry names, or else all of the file's room, which is a folder of
the same name in tests. The tests must pass without faults. Exit code 1 means that one
was not detected.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path, PurePath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS, HUNG = 1800, "no end within 1800 s"  # The tests of a room take minutes.


def main(words: list[str]) -> int:
    """Judge the faults whose file contains one of the words; all without words."""
    faults = tomllib.loads((ROOT / "tests/mutations.toml").read_text())
    mutations: list[dict[str, Any]] = []
    for file, changes in faults.items():
        if any(word in file for word in words or [""]):
            for before, change in changes.items():
                after, *named = [change] if isinstance(change, str) else change
                fault = {"file": file, "before": before, "after": after, "tests": named}
                mutations.append(fault)
    tests: list[str | None] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree))
        try:
            [mutated(tree, m) for m in mutations]  # Stale faults are errors at once.
            print("| file | before | after | detected by |\n|---|---|---|---|")
            for fault in mutations:
                tests.append(judge(tree, fault))
                code = (f"`{fault[key].strip()}`" for key in ("before", "after"))
                cells = [fault["file"], *code, tests[-1] or "**not detected**"]
                row = " | ".join(cell.replace("|", r"\|") for cell in cells)
                print(f"| {row} |", flush=True)
            detected = [test for test in tests if test]
            print(f"\n{len(detected)} of {len(tests)} detected.", flush=True)
            if detected and run(tree, sorted({*detected} - {HUNG}))[0]:
                raise SystemExit("Some of these tests fail without a fault, too.")
        finally:
            git("worktree", "remove", "--force", str(tree))
    return int(None in tests)


def mutated(tree: Path, mutation: dict[str, Any]) -> str:
    """Return the file's text with the fault."""
    text = (tree / mutation["file"]).read_text()
    if (count := text.count(mutation["before"])) != 1:
        where = f"{mutation['file']} has {mutation['before']!r} {count} times"
        raise SystemExit(f"{where}, expected once: adapt tests/mutations.toml.")
    return text.replace(mutation["before"], mutation["after"])


def judge(tree: Path, mutation: dict[str, Any]) -> str | None:
    """Return the first test that fails with the fault, or None."""
    (tree / mutation["file"]).write_text(mutated(tree, mutation))
    code, output = run(tree, mutation["tests"] or tests_of(mutation["file"]))
    git("-C", str(tree), "checkout", "--quiet", ".")
    if code in (None, 0):
        return None if code == 0 else HUNG
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    if code not in (1, 2) or not failed:
        raise SystemExit(f"pytest exited with {code}:\n{output[-3000:]}")
    return failed[1]


def tests_of(file: str) -> list[str]:
    """Return the test files of a source file's room, those with its name first."""
    path = PurePath(file)
    room = path.parts[path.parts[0] == "marl_collect"]
    tests = sorted((ROOT / "tests" / room).rglob("test_*.py"))
    tests.sort(key=lambda test: f"_{path.stem}_" not in f"_{test.stem}_")
    return [str(test.relative_to(ROOT)) for test in tests]


def run(tree: Path, tests: list[str]) -> tuple[int | None, str]:
    """Return pytest's exit code, None if it takes too long, and its output."""
    flags = ("-x", "-q", "-rfE", "-pno:cacheprovider", "-ofaulthandler_timeout=0")
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    env = os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "1000"}
    options: Any = {"cwd": tree, "env": env, "capture_output": True, "text": True}
    try:
        process = subprocess.run(command, timeout=SECONDS, check=False, **options)
    except subprocess.TimeoutExpired:
        return None, ""
    return process.returncode, process.stdout + process.stderr


def git(*arguments: str) -> None:
    """Run git in the repository."""
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
