"""A block of memory that several processes map, without a name in /dev/shm.

The creator owns it. Nothing has to be unlinked: the memory goes when the last
process that mapped it ends, however it ends. Others open the creator's file
descriptor through ``/proc``, so that a handle can be pickled anywhere.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryHandle:
    """How another process finds a block, as long as its owner keeps it.

    Attributes:
        path: opens the same file in any process of this user.
        inode: number of that file, by which a stale handle is noticed.
        size: bytes.
    """

    path: str
    inode: int
    size: int


class SharedBlock:
    """Shared memory, zero at first, seen through `view`."""

    def __init__(self, fd: int, handle: MemoryHandle, *, owner: bool) -> None:
        self.handle = handle
        self._fd: int | None = fd if owner else None
        self._map = mmap.mmap(fd, handle.size)
        self.view = memoryview(self._map)
        """The bytes, writable."""

    @classmethod
    def create(cls, size: int, name: str = "block") -> "SharedBlock":
        """Make a block of ``size`` bytes; this process owns it.

        Args:
            size: bytes, at least 1.
            name: shows in ``/proc/<pid>/fd``.
        """
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(f"marl_collect-{name}")
            path = f"/proc/{os.getpid()}/fd/{fd}"
        else:  # macOS; the file is removed in close().
            fd, path = tempfile.mkstemp(prefix=f"marl_collect-{name}-")
        try:
            os.ftruncate(fd, size)
            handle = MemoryHandle(path, os.fstat(fd).st_ino, size)
            return cls(fd, handle, owner=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, handle: MemoryHandle) -> "SharedBlock":
        """Map a block of another process.

        Raises:
            FileNotFoundError: its owner has closed it, or is gone.
        """
        fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != handle.inode:
                raise FileNotFoundError(
                    f"{handle.path} is no longer the shared memory it was: its owner "
                    "closed it. Keep the owner open while others attach."
                )
            return cls(fd, handle, owner=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the owner's file: nobody can attach any more; may be called twice.

        The mapping itself goes with the last view of it.
        """
        fd, self._fd = self._fd, None
        if fd is None:
            return
        os.close(fd)
        if not self.handle.path.startswith("/proc/"):
            os.unlink(self.handle.path)

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()
