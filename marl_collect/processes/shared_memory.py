"""Memory that several processes map: fully reserved, found by a path, with one owner.

A shared segment is a memfd, which only Linux has. It has no name in a file system, is
not limited by the size of ``/dev/shm``, and is freed when the last process that maps it
ends, even if that process is killed. Other processes open it as ``/proc/<pid>/fd/<n>``.
``linux.create_memory_file`` says what replaces it where the kernel refuses it.
``Segment.ordinary`` is memory of this process alone, which every system has.
"""

import errno
import mmap
import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from marl_collect.processes import cgroups, linux

_NO_FILES = (errno.EMFILE, errno.ENFILE)
_OWN_FILES = "/proc/self/fd"
_CLOSED = (
    "other processes of this user may not open the files of its owner, which is not "
    "dumpable, as after os.setuid(). Start the program as the user that it shall run "
    "as, or call `ctypes.CDLL(None).prctl(4, 1)` (PR_SET_DUMPABLE) after os.setuid()"
)


@dataclass(frozen=True)
class MemoryHandle:
    """Identifies a segment to other processes while its owner keeps it; picklable.

    Attributes:
        path: opens the same file in any process of this user.
        inode: number of that file, which detects a stale handle.
        nbytes: size of the segment.
    """

    path: str
    inode: int
    nbytes: int

    def exists(self) -> bool:
        """Whether the owner still holds the segment, so that it can be attached."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False


@final
class Segment:
    """A mapped piece of memory, initially zero.

    Attributes:
        buffer: the mapping, readable and writable.
    """

    def __init__(self, buffer: mmap.mmap, handle: MemoryHandle | None) -> None:
        """Take ownership of a mapping, which holds the only file descriptor."""
        self.buffer = buffer
        self._handle = handle

    @property
    def handle(self) -> MemoryHandle:
        """For ``attach`` in another process, until this one closes the segment."""
        assert self._handle is not None, "ordinary memory has no handle"
        return self._handle

    @classmethod
    def ordinary(cls, nbytes: int, what: str, hint: str = "") -> Self:
        """Reserve memory of this process; a forked process gets a copy.

        Raises:
            MemoryError: as ``create``.
        """
        free = free_memory()
        if free is not None and nbytes > free:
            raise MemoryError(_too_little(what, nbytes, free, hint))
        try:
            # Reserved now, so that a shortage does not show in the middle of a batch.
            populate = getattr(mmap, "MAP_POPULATE", 0)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate
            return cls(mmap.mmap(-1, nbytes, flags=flags), None)
        except OSError as error:
            raise MemoryError(_too_little(what, nbytes, free, hint)) from error

    @classmethod
    def create(cls, nbytes: int, what: str, hint: str = "") -> Self:
        """Reserve ``nbytes`` for ``what``.

        Raises:
            MemoryError: too little memory is free. The message names what needs how
                much, how much is free, and ``hint``.
            PermissionError: other processes may not open the files of this one.
            OSError: too many files are open, the size exceeds RLIMIT_FSIZE, /proc is
                not mounted, or this is not Linux.
        """
        if sys.platform != "linux":
            raise OSError(
                errno.ENOSYS,
                f"{what} is memory that processes share: it needs Linux. `Collector` "
                "and SerialEnv, which use one process, may run on other systems",
            )
        if not os.path.isdir(_OWN_FILES):
            raise FileNotFoundError(
                errno.ENOENT,
                f"{what} is shared memory that other processes open by its path in "
                "/proc, but /proc is not mounted here. Mount it with `mount -t proc "
                "proc /proc`, or start the container with /proc",
            )
        if linux.is_closed_to_others():
            raise PermissionError(errno.EACCES, f"{what} is shared memory: {_CLOSED}")
        free = free_memory()
        if free is not None and nbytes > free:
            raise MemoryError(_too_little(what, nbytes, free, hint))
        descriptor = _new_file(what, nbytes)
        try:
            os.ftruncate(descriptor, nbytes)
            # Reserved now, so that a shortage is an error here and not a SIGBUS later.
            os.posix_fallocate(descriptor, 0, nbytes)
            inode = os.fstat(descriptor).st_ino
            buffer = mmap.mmap(descriptor, nbytes)
            folder = linux.folder_of_this_process()
            path = f"{folder}/fd/{_duplicate(descriptor)}"
            return cls(buffer, MemoryHandle(path, inode, nbytes))
        except OSError as error:
            if error.errno in _NO_FILES:
                raise _too_many_files(error, what) from error
            if error.errno == errno.EFBIG:
                raise _too_large(error, what, nbytes) from error
            raise MemoryError(_too_little(what, nbytes, free, hint)) from error
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, handle: MemoryHandle) -> Self:
        """Map a segment that another process created.

        Raises:
            FileNotFoundError: its owner has closed it or has ended.
            PermissionError: its owner keeps others from opening its files.
        """
        try:
            descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError as error:
            raise PermissionError(
                error.errno, f"{handle.path} cannot be opened: {_CLOSED}"
            ) from error
        try:
            if os.fstat(descriptor).st_ino != handle.inode:
                raise FileNotFoundError(
                    f"{handle.path} is no longer the expected shared memory: its owner "
                    "closed it. Keep the owner open while other processes attach."
                )
            return cls(mmap.mmap(descriptor, handle.nbytes), handle)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Free the memory once no array or tensor uses it; may be called twice.

        No process can attach from then on. The mapping is not closed explicitly,
        because that would unmap memory under arrays that still use it. The last
        reference to it frees it.
        """
        if hasattr(self, "buffer"):
            del self.buffer


def free_memory() -> int | None:
    """Return the number of bytes that can be allocated, or None if unknown.

    The smaller of the machine's available memory and the remaining memory of this
    process's control group.
    """
    limits = [_machine_free(), cgroups.free_memory()]
    return min((limit for limit in limits if limit is not None), default=None)


def _machine_free() -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _new_file(what: str, nbytes: int) -> int:
    try:
        return linux.create_memory_file(nbytes)
    except OSError as error:
        if error.errno in _NO_FILES:
            raise _too_many_files(error, what) from error
        if error.errno == errno.ENOSPC:
            raise MemoryError(
                f"{what} needs {readable(nbytes)} of shared memory: {error.strerror}"
            ) from error
        raise


def _duplicate(descriptor: int) -> int:
    """Return the duplicate of ``descriptor`` that its mapping holds.

    Python keeps it open as long as the mapping, so no second duplicate is needed.
    """
    status = os.fstat(descriptor)
    file = (status.st_dev, status.st_ino)
    for name in os.listdir(_OWN_FILES):
        with suppress(OSError):  # Another thread may have closed it.
            other = os.fstat(int(name))
            if int(name) != descriptor and (other.st_dev, other.st_ino) == file:
                return int(name)
    raise AssertionError("The mapping holds no descriptor.")


def _too_many_files(error: OSError, what: str) -> OSError:
    return OSError(
        error.errno,
        f"{what} briefly needs two open files, and there are too many open files. "
        "Raise the limit with `ulimit -n 4096`, or hold fewer batches",
    )


def _too_large(error: OSError, what: str, nbytes: int) -> OSError:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    allowed = "less" if limit == resource.RLIM_INFINITY else readable(limit)
    return OSError(
        error.errno,
        f"{what} needs {readable(nbytes)} of shared memory, which counts as a file, "
        f"but files of this process are limited to {allowed} (RLIMIT_FSIZE). Raise the "
        "limit with `ulimit -f unlimited`",
    )


def _too_little(what: str, nbytes: int, free: int | None, hint: str) -> str:
    have = "an unknown amount" if free is None else readable(free)
    return (
        f"{what} needs {readable(nbytes)} of memory, but {have} is free. {hint}".strip()
    )


def readable(nbytes: int) -> str:
    """Format a number of bytes with its unit."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
