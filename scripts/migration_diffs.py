"""Count the lines that a TorchRL script changes to use our collector.

    python scripts/migration_diffs.py

``examples/<name>_torchrl.py`` uses TorchRL alone; ``examples/<name>.py`` is the same
script with our collector. Module docstrings and blank lines are not counted. The
complete diffs are written to the documentation, between two comments::

    <!-- diff: multi_agent_ppo -->
    <!-- end of diff -->

With ``--check`` they are compared only.
"""

import ast
import re
import sys
from difflib import unified_diff
from pathlib import Path

from generated import update

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "coming_from_torchrl.md"
PLACE = re.compile(
    r"(<!-- diff: (?P<name>\w+) -->\n).*?(<!-- end of diff -->\n)", re.DOTALL
)


def main() -> int:
    """Print the counts; write or compare the page; 1 if there was a difference."""
    for theirs in sorted(EXAMPLES.glob("*_torchrl.py")):
        name = theirs.stem.removesuffix("_torchrl")
        print(f"{name}: {counts(name)}")
    expected = PLACE.sub(_written, PAGE.read_text(encoding="utf-8"))
    return update({PAGE: expected}, "python scripts/migration_diffs.py")


def changes(name: str) -> list[str]:
    """Return the lines of the diff of an example, blank ones left out."""
    theirs, ours = (_code(EXAMPLES / f"{name}{end}.py") for end in ("_torchrl", ""))
    lines = list(unified_diff(theirs, ours, n=0, lineterm=""))[2:]
    return [line for line in lines if line[1:].strip()]


def counts(name: str) -> str:
    """Return how many lines of an example are removed and added."""
    lines = changes(name)
    removed, added = (sum(line[0] == sign for line in lines) for sign in "-+")
    total = sum(bool(line.strip()) for line in _code(EXAMPLES / f"{name}_torchrl.py"))
    return f"{removed} of {total} lines removed, {added} added"


def _code(script: Path) -> list[str]:
    """Return the lines below the module docstring."""
    text = script.read_text(encoding="utf-8")
    end = ast.parse(text).body[0].end_lineno
    return text.splitlines()[end:]


def _written(match: re.Match[str]) -> str:
    name = match["name"]
    lines = "\n".join(re.sub("^@@.*", "@@", line) for line in changes(name))
    return f"{match[1]}\n{counts(name)}:\n\n```diff\n{lines}\n```\n\n{match[3]}"


if __name__ == "__main__":
    sys.exit(main())
