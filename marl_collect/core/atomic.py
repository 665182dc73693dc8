"""Atomic changes to files.

A file is renamed to its final name after all of its content has reached the disk.
Readers therefore see all of it or nothing, even after a crash.
"""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of ``path`` completely or not at all; text is UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # Mode "x" does not write through a link.
    with temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    sync(folder, os.O_RDONLY)


def sync(path: Path, mode: int) -> None:
    """Wait until a file, opened with the flags ``mode``, is on the disk."""
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
