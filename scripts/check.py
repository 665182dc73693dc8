"""Runs what CI runs, cheapest first, and stops at the first failure.

    python scripts/check.py            # nothing if this tree has passed before
    python scripts/check.py --again    # in any case

The stamp ``.venv/.checked`` has hashes of what passed: of the tree, with uncommitted
and untracked files but without those that git ignores, and of Python and the installed
packages.
"""

import argparse
import hashlib
import os
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


def main() -> int:
    """Run the steps; return the exit code of the first that fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="ignore the stamp")
    options = parser.parse_args()
    stamp = f"{tree_hash()} {packages_hash()}\n"
    if not options.again and STAMP.exists() and STAMP.read_text() == stamp:
        print("This tree has passed before.")
        return 0
    STAMP.unlink(missing_ok=True)
    for step in STEPS:
        print(f"--- make {step}", flush=True)
        begin = time.monotonic()
        command = ["make", "--no-print-directory", step]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        outcome = "failed" if code else "passed"
        seconds = time.monotonic() - begin
        print(f"--- make {step} {outcome} after {seconds:.0f} s", flush=True)
        if code:
            return code
    if stamp != f"{tree_hash()} {packages_hash()}\n":
        print("The tree has changed meanwhile, so it is not marked as checked.")
        return 0
    STAMP.write_text(stamp)
    return 0


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
    """Return a hash of Python's version and of the installed packages' versions."""
    packages = {f"{p.name}=={p.version}" for p in metadata.distributions()}
    text = "\n".join([sys.version, *sorted(packages)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
