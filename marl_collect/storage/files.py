"""Changes to the file system that are either complete or did not happen.

A file or folder appears under its name by one rename, after everything in it has
reached the disk; so a reader, or whoever comes after a crash, sees all or nothing.
"""

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self, final


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of ``path``, or leave it as it is."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Wait until every file in ``folder`` is on the disk, and the folders too."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name), os.O_RDWR)
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    if sys.platform != "win32":  # It has no such call, and orders renames itself.
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@final
class FolderLock:
    """Keeps a folder to one writer at a time; the system frees it with the process."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            BlockingIOError: if another process, or this one, writes there already.
        """
        # Not "w": whoever holds the lock must not lose the file's content.
        self._file = path.open("a")
        try:
            _lock(self._file.fileno())
        except OSError as error:
            self._file.close()
            raise BlockingIOError(
                error.errno,
                f"{path.parent} is being written to by another process. Wait for it, "
                "or write to another folder.",
            ) from error

    def close(self) -> None:
        """Give the lock back."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
