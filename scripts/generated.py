"""Files that scripts write from the code; with ``--check`` they are only compared."""

import sys
from collections.abc import Mapping
from pathlib import Path


def update(contents: Mapping[Path, str], command: str) -> int:
    """Write files that differ from their content; with ``--check`` compare only.

    Return the exit code, 1 if there was a difference. A message names the ``command``.
    """
    different = [
        path
        for path, content in contents.items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    for path in different:
        if "--check" in sys.argv:
            print(f"`{command}` would change {path.name}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(contents[path], encoding="utf-8")
    return int(bool(different))
