"""Locks of folders, which the system releases when their process ends."""

import errno
import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, final

from marl_collect.core.closing import Closing

LOCK: Final = ".lock"


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


def _open_locked(path: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    while True:
        # Who may open the file may lock it, so nobody else may, whatever the umask.
        file = os.fdopen(os.open(path, flags, 0o600), "r+b")
        with suppress(PermissionError):  # Another's file.
            os.fchmod(file.fileno(), 0o600)  # Older versions made it readable.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except OSError as error:
            file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise BlockingIOError(
                error.errno,
                f"{path.parent} is being written to by another process. Wait for it, "
                "or write to another folder.",
            ) from error
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
