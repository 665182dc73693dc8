"""Writes the exact versions installed beside this Python as a pip constraints file.

python scripts/write_constraints.py constraints.txt
"""

import importlib.metadata
import platform
import re
import sys
from pathlib import Path

OWN = "marl-collect"
BROUGHT_ALONG = {"pip"}  # comes with the virtual environment
# torch names the CUDA libraries of its own build, exactly; other builds have none.
CHOSEN_BY_TORCH = re.compile(r"nvidia-.*|cuda-.*|triton")


def main(target: Path) -> None:
    """Writes the file; local version labels such as +cpu are left out."""
    versions = {
        re.sub(
            r"[-_.]+", "-", distribution.name
        ).lower(): distribution.version.partition("+")[0]
        for distribution in importlib.metadata.distributions()
    }
    lines = [
        f"{name}=={version}"
        for name, version in sorted(versions.items())
        if name not in BROUGHT_ALONG | {OWN} and not CHOSEN_BY_TORCH.fullmatch(name)
    ]
    python = f"CPython {platform.python_version()}, {sys.platform} {platform.machine()}"
    header = (
        f"# The versions that the tests pass with, every extra included: {python}.\n"
        "# Written by `make constraints`; not edited by hand.\n"
    )
    target.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
