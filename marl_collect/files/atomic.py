"""Atomic changes to files.

A file is renamed to its final name after all of its content has reached the disk.
Readers therefore see all of it or nothing, even after a crash.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import Final

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def require_folder(path: Path) -> None:
    """Check that a path can be that of a file to be written.

    Raises:
        FileNotFoundError: if its folder does not exist.
        IsADirectoryError: if it is a folder itself.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: pass the name of a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}.")


@contextmanager
def named_if_full(path: Path) -> Iterator[None]:
    """Add a file and advice to errors of a full disk, a quota or a limit.

    The system's own error of a write names no file.

    Args:
        path: of the file that is written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        advice = f"Free some space for {path.parent}, or write to another folder"
        if error.errno == errno.EFBIG:
            advice = "Raise the limit of this process (ulimit -f)"
        text = f"{os.strerror(error.errno)}. {advice}"
        # The same error: a new one would keep the frames of both, and what they hold.
        error.args = (error.errno, text)
        error.strerror, error.filename = text, str(path)
        del error.filename2  # Of a copy: its source was read.
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of ``path`` completely or not at all; text is UTF-8.

    Several processes may write the same path at once; the last one wins. An error
    leaves nothing behind. A process that is killed leaves a hidden file
    ``.NAME.HEX.new``, which the next call for the same path removes. A device or a pipe
    is written in place: a rename would replace ``/dev/null`` by a file.

    Raises:
        OSError: if it cannot be written; names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file() and not path.is_dir():
        with named_if_full(path):
            path.write_bytes(data)
        return
    _remove_leftovers(path)
    with named_if_full(path):
        while not _write(path, data):
            pass
        sync_folder(path.parent)


def _write(path: Path, data: bytes) -> bool:
    """Replace a file; return False if another call took the new one for a leftover."""
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.new")
    try:
        with temporary.open("xb") as file:
            with suppress(OSError):  # Some file systems have no locks.
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                return False  # It was not locked yet.
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove new files of ``path`` that nobody has locked: their writers are dead."""
    for leftover in path.parent.glob(f".{escape(path.name)}.*.new"):
        # Another's file, a link, or one that has just got its final name.
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()
            finally:
                os.close(descriptor)


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
