"""Runs what CI runs, cheapest first, and stops at the first failure.

    python scripts/check.py            # nothing if this tree has passed before
    python scripts/check.py --again    # in any case

The stamp ``.venv/.checked`` says what passed: the tree's hash, its commit, the versions
of Python and of the installed packages, and how long every step took. A tree with the
same hash and the same packages is not checked again. The hash covers uncommitted and
untracked files, without those that git ignores.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = Path(sys.prefix) / ".checked"
STEPS = (
    "lint",
    "format-check",
    "docs",
    "typecheck",
    "test-fast",
    "test-processes",
    "test-tensordict",
)
"""Targets of the Makefile, cheapest first."""

_SUMMARY = re.compile(r"=* ?(\d+ passed.*?|.*\d+ failed.*?) ?=*$")


def main() -> int:
    """Run the steps; return the exit code of the first that fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="ignore the stamp")
    options = parser.parse_args()
    tree = {"tree": tree_hash(), "packages": packages_hash()}
    last_pass = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    if not options.again and {name: last_pass.get(name) for name in tree} == tree:
        print(
            f"This tree passed on {last_pass['date']} (commit {last_pass['commit']}):"
        )
        for step, result in last_pass["steps"].items():
            print(f"  {step:16} {result}")
        return 0
    STAMP.unlink(missing_ok=True)
    steps: dict[str, str] = {}
    for step in STEPS:
        print(f"--- make {step}", flush=True)
        begin = time.monotonic()
        code, summary = run(["make", "--no-print-directory", step])
        seconds = f"{time.monotonic() - begin:.0f} s"
        if code:
            print(f"--- make {step} failed after {seconds}", flush=True)
            return code
        steps[step] = f"{seconds}{', ' if summary else ''}{summary}"
        print(f"--- make {step} passed: {steps[step]}", flush=True)
    if tree["tree"] != tree_hash():
        print("The tree has changed meanwhile, so it is not marked as checked.")
        return 0
    stamp = {
        **tree,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "tensordict": metadata.version("tensordict"),
        "steps": steps,
    }
    STAMP.write_text(json.dumps(stamp, indent=2) + "\n")
    return 0


def run(command: list[str]) -> tuple[int, str]:
    """Run a command, pass on its output; return its exit code and pytest's summary."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        tail = b""
        while block := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
            tail = (tail + block)[-4000:]
    lines = tail.decode(errors="replace").splitlines()
    summaries = [match[1] for line in lines if (match := _SUMMARY.match(line))]
    return process.returncode, summaries[-1] if summaries else ""


def tree_hash() -> str:
    """Return git's hash of the working tree, untracked files included."""
    objects = git("rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory() as folder:
        # The index and the objects of the repository stay as they are.
        env = {
            "GIT_INDEX_FILE": str(Path(folder) / "index"),
            "GIT_OBJECT_DIRECTORY": folder,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }
        git("read-tree", "HEAD", **env)
        git("add", "--all", **env)
        return git("write-tree", **env)


def packages_hash() -> str:
    """Return a hash of the names and versions of the installed packages."""
    packages = {f"{p.name}=={p.version}" for p in metadata.distributions()}
    text = "\n".join([sys.version, *sorted(packages)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def commit() -> str:
    """Return the commit, and whether files differ from it."""
    return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def git(*arguments: str, **variables: str) -> str:
    """Run git in the checkout with these environment variables; return its output."""
    process = subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
