"""Memory that several processes map: reserved at once, named by a path, owned once.

On Linux a segment is a memfd: it has no name in a file system, is not limited by
the size of ``/dev/shm``, and is gone when the last process that maps it is gone,
however that process ends. Other processes open it as ``/proc/<pid>/fd/<n>``.
"""

import errno
import mmap
import os
import resource
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

_NO_FILES = (errno.EMFILE, errno.ENFILE)
_OWN_FILES = "/proc/self/fd"
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryHandle:
    """How another process finds a segment, as long as its owner keeps it; pickles.

    Attributes:
        path: opens the same file in any process of this user.
        inode: number of that file, by which a stale handle is noticed.
        nbytes: size of the segment.
    """

    path: str
    inode: int
    nbytes: int

    def exists(self) -> bool:
        """Whether the owner still has the segment, so that it can be attached."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False


@final
class Segment:
    """A mapped piece of memory, zeroed at first.

    Attributes:
        buffer: the mapping, readable and writable.
        handle: what ``attach`` opens in another process, while the process that
            created the segment has not closed it.
    """

    def __init__(self, buffer: mmap.mmap, handle: MemoryHandle) -> None:
        """Own a mapping, which holds the one file descriptor that there is."""
        self.buffer = buffer
        self.handle = handle

    @classmethod
    def create(cls, nbytes: int, what: str, hint: str = "") -> Self:
        """Reserve ``nbytes`` for ``what``.

        Raises:
            MemoryError: naming what needs how much and how much is free, and
                ``hint``, if the memory is not there.
            OSError: if there are too many open files, if files must not become that
                large, or if /proc is not mounted.
        """
        if not os.path.isdir(_OWN_FILES):
            raise FileNotFoundError(
                errno.ENOENT,
                f"{what} is shared memory, which other processes open by its path in "
                "/proc, but /proc is not mounted here. Mount it: `mount -t proc proc "
                "/proc`, or start the container with it",
            )
        free = free_memory()
        if free is not None and nbytes > free:
            raise MemoryError(_too_little(what, nbytes, free, hint))
        descriptor = _new_file(what)
        try:
            os.ftruncate(descriptor, nbytes)
            # Reserved now, a shortage is an error here and no SIGBUS later.
            os.posix_fallocate(descriptor, 0, nbytes)
            inode = os.fstat(descriptor).st_ino
            buffer = mmap.mmap(descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{_duplicate(descriptor)}"
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
            FileNotFoundError: if its owner has closed it or is gone.
        """
        descriptor = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != handle.inode:
                raise FileNotFoundError(
                    f"{handle.path} is no longer the shared memory it was: its owner "
                    "closed it. Keep the owner open while others attach."
                )
            return cls(mmap.mmap(descriptor, handle.nbytes), handle)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Give the memory back once no array or tensor uses it; may be called twice.

        Nobody can attach from then on. The mapping is not undone here: arrays on it do
        not keep it from being unmapped under them, only from being forgotten.
        """
        if hasattr(self, "buffer"):
            del self.buffer


def free_memory() -> int | None:
    """Return the bytes that can still be taken, or None where nothing tells.

    The smaller of the machine's available memory and what the control group of
    this process leaves.
    """
    limits = [value for value in (_machine_free(), _cgroup_free()) if value is not None]
    return min(limits, default=None)


def _machine_free() -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_free() -> int | None:
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        return limit - int((_CGROUP / "memory.current").read_text())
    return None


def _new_file(what: str) -> int:
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create("marl_collect", os.MFD_CLOEXEC)
        descriptor, name = tempfile.mkstemp(prefix="marl_collect")
    except OSError as error:
        if error.errno in _NO_FILES:
            raise _too_many_files(error, what) from error
        raise
    os.unlink(name)
    return descriptor


def _duplicate(descriptor: int) -> int:
    """Return the descriptor that a mapping of ``descriptor`` made for itself.

    Python keeps it as long as the mapping; a second one would only use up numbers.
    """
    status = os.fstat(descriptor)
    own = (status.st_dev, status.st_ino)
    for name in os.listdir(_OWN_FILES):
        with suppress(OSError):  # Another thread may have closed it meanwhile.
            found = os.fstat(int(name))
            if int(name) != descriptor and (found.st_dev, found.st_ino) == own:
                return int(name)
    raise AssertionError("The mapping holds no descriptor.")


def _too_many_files(error: OSError, what: str) -> OSError:
    return OSError(
        error.errno,
        f"{what} takes two open files for a moment, and there are too many open files "
        "already. Raise the limit with `ulimit -n 4096`, or hold fewer batches",
    )


def _too_large(error: OSError, what: str, nbytes: int) -> OSError:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    allowed = "less" if limit == resource.RLIM_INFINITY else readable(limit)
    return OSError(
        error.errno,
        f"{what} needs {readable(nbytes)} of shared memory, which counts as a file, "
        f"and files of this process may have {allowed} (RLIMIT_FSIZE). Raise the limit "
        "with `ulimit -f unlimited`",
    )


def _too_little(what: str, nbytes: int, free: int | None, hint: str) -> str:
    have = "unknown" if free is None else readable(free)
    return (
        f"{what} needs {readable(nbytes)} of memory, but free is {have}. {hint}".strip()
    )


def readable(nbytes: int) -> str:
    """Write a number of bytes for people."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
