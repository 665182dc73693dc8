"""Folders that reach the disk completely or not at all, and locks."""

import ctypes
import errno
import fcntl
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final, final

from marl_collect.core.closing import Closing
from marl_collect.files.atomic import sync, sync_folder
from marl_collect.storage.remote import check_local

LOCK: Final = ".lock"
_SYNC_FILE_RANGE_WRITE: Final = 2
"""From ``<fcntl.h>``."""


def remove(path: Path) -> None:
    """Remove a folder, a file or a link; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(folder: Path) -> int:
    """Return the sum of the sizes of all files in a folder, in bytes."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder in ``folder`` is on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name), os.O_RDWR)
        sync_folder(Path(parent))


def begin_sync(descriptor: int, begin: int, end: int) -> None:
    """Let the disk write a range of a file without waiting for it.

    A later sync, which is still needed, waits for the rest only. Not every system and
    file system can do this, so failures are ignored.
    """
    # Linux has it, other systems do not.
    sync_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_range is not None:
        offset, size = ctypes.c_int64(begin), ctypes.c_int64(end - begin)
        sync_range(descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)


def rename_synced(temporary: Path, final: Path) -> None:
    """Rename a file or folder after all of its content has reached the disk."""
    if temporary.is_dir():
        sync_tree(temporary)
    else:
        sync(temporary, os.O_RDWR)
    temporary.rename(final)
    sync_folder(final.parent)


@contextmanager
def completed(target: Path, what: str, *, or_empty: bool = False) -> Iterator[Path]:
    """Yield a path for a new file or folder, which is renamed to ``target`` at the end.

    The path is in a hidden folder ``.NAME.incomplete`` beside the target. An error
    removes it. If the process is killed it stays, and is removed here by the next call
    for the same target.

    Args:
        target: the file or folder to write.
        what: verb for the error, such as "export".
        or_empty: whether an empty folder may be at the target.

    Raises:
        ValueError: if the target is a URL.
        FileExistsError: if something is at the target.
        BlockingIOError: if another process writes to the same target.
    """
    check_local(target)
    target = target.absolute()  # A later chdir has no effect.
    _check_free(target, what, or_empty=or_empty)
    created = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = target.with_name(f".{target.name}.incomplete")
        if hidden.is_symlink():
            hidden.unlink()  # What it points to stays.
        hidden.mkdir(exist_ok=True)
        with FolderLock(hidden / LOCK):
            try:
                # Another process may have written it until the lock was free.
                _check_free(target, what, or_empty=or_empty)
                for leftover in hidden.iterdir():
                    if leftover.name != LOCK:
                        remove(leftover)
                yield hidden / target.name
                rename_synced(hidden / target.name, target)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
    except BaseException:
        for parent in created:
            with suppress(OSError):  # It was not created, or is in use.
                parent.rmdir()
        raise


def _check_free(target: Path, what: str, *, or_empty: bool) -> None:
    if or_empty and target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        free = "a new or empty folder" if or_empty else "a path that does not exist"
        raise FileExistsError(f"{target} exists: {what} to {free}.")


@final
class FolderLock(Closing):
    """Limits a folder to one writer; the system releases it when the process ends.

    A forked process does not hold the lock and cannot release it.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Args:
            path: of the lock's file, in the folder.

        Raises:
            BlockingIOError: if this or another process has the lock.
        """
        self._file = _open_locked(path)
        self._owner = os.getpid()
        _LOCKS.add(self)

    @property
    def held(self) -> bool:
        """Whether this process has the lock: False after ``close`` and in a fork."""
        return not self._file.closed and self._owner == os.getpid()

    def close(self) -> None:
        """Release the lock; in a fork it stays with the process that took it."""
        if self.held:
            # This also releases copies held by forks.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _lock(descriptor: int, mode: int, message: str) -> None:
    """Lock a file; raise a ``BlockingIOError`` if another process has locked it."""
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise BlockingIOError(error.errno, message) from error


def _open_locked(path: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    while True:
        # Who may open the file may lock it, so nobody else may, whatever the umask.
        file = os.fdopen(os.open(path, flags, 0o600), "r+b")
        with suppress(PermissionError):  # Another's file.
            os.fchmod(file.fileno(), 0o600)  # Older versions made it readable.
        try:
            _lock(
                file.fileno(),
                fcntl.LOCK_EX,
                f"{path.parent} is being written to by another process. Wait for it, "
                "or write to another folder.",
            )
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # The file was removed by its last holder: lock the new one.


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


_LOCKS: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close copies of locks, which a child would hold after its parent has ended."""
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_release_in_child)
