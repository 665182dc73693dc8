"""Files that scripts write from the code; with ``--check`` they are only compared."""

import sys
from collections.abc import Mapping
from pathlib import Path


def update(contents: Mapping[Path, str], command: str) -> int:
    """Write files that differ from their content; with ``--check`` compare only.

    Args:
        contents: of each file.
        command: that writes them, for the message.

    Returns:
        The exit code: 1 if there was a difference, else 0.
    """
    different = [
        path
        for path, content in contents.items()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    if "--check" in sys.argv and different:
        print(f"`{command}` would change:", *(path.name for path in different))
    elif "--check" not in sys.argv:
        for path in different:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(contents[path], encoding="utf-8")
    return int(bool(different))
