"""Sleeping until somebody in another process posts.

On Linux this is a POSIX semaphore in shared memory: to post one that nobody waits for
takes tens of nanoseconds and no system call, as does taking what was posted. We lay
it out ourselves and let the standard library's `SemLock` operate on it, whose
methods cost a hundredth of a foreign function call. Elsewhere a sleeper looks every
fifth of a millisecond.
"""

import _multiprocessing  # type: ignore[import-not-found]
import ctypes
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final, Protocol, final

NBYTES: Final = 64
"""Bytes of a semaphore: a cache line of its own."""

_COUNTING: Final = 1
_MOST: Final = 2**31 - 1
_POLL_SECONDS: Final = 0.0002


class Semaphore(Protocol):
    """What has been posted and not yet taken, in shared memory."""

    def post(self) -> None:
        """Wake who sleeps, or who will."""
        ...

    def take(self) -> bool:
        """Take what was posted, if there is anything, without sleeping."""
        ...

    def sleep(self, seconds: float) -> bool:
        """Take what was posted; sleep, for at most ``seconds``, until there is any.

        Returns:
            Whether there was.
        """
        ...


@final
class PosixSemaphore:
    """That of the GNU C library, which has semaphores at any address."""

    def __init__(self, buffer: Any, offset: int, *, fresh: bool) -> None:
        """Use the memory of ``buffer`` at ``offset``, a multiple of `NBYTES`.

        Args:
            buffer: shared memory, which stays mapped as long as the semaphore lives.
            offset: within it.
            fresh: begin with nothing posted; or else join those who have begun.
        """
        self._kept = (ctypes.c_char * NBYTES).from_buffer(buffer, offset)
        address = ctypes.addressof(self._kept)
        if fresh and ctypes.CDLL(None).sem_init(ctypes.c_void_p(address), 1, 0):
            raise OSError("The C library refuses to make a semaphore.")
        # This is how the standard library joins the semaphores that it named itself.
        rebuild = _multiprocessing.SemLock._rebuild  # noqa: SLF001 - has no other name
        lock = rebuild(address, _COUNTING, _MOST, None)
        self.post = lock.release
        self._acquire = lock.acquire

    def take(self) -> bool:
        """See `Semaphore`."""
        return self._acquire(False)

    def sleep(self, seconds: float) -> bool:
        """See `Semaphore`; lets other threads run."""
        return self._acquire(True, seconds)


@final
class PolledSemaphore:
    """Where there is none: a number that changes with every post; several are one."""

    def __init__(self, buffer: Any, offset: int, *, fresh: bool) -> None:
        """See `PosixSemaphore`."""
        self._cell = memoryview(buffer)[offset : offset + 4].cast("I")
        if fresh:
            self._cell[0] = 0
        self._seen = 0

    def post(self) -> None:
        """See `Semaphore`: sleepers look by themselves."""
        self._cell[0] = (self._cell[0] + 1) & 0xFFFFFFFF

    def take(self) -> bool:
        """See `Semaphore`."""
        seen, self._seen = self._seen, self._cell[0]
        return seen != self._seen

    def sleep(self, seconds: float) -> bool:
        """See `Semaphore`."""
        end = time.monotonic() + seconds
        while not self.take():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)  # noqa: TID251 - nothing here can be waited on
        return True


def semaphore(buffer: Any, offset: int, *, fresh: bool) -> Semaphore:
    """Return the best semaphore that this system has; see `PosixSemaphore`."""
    kind = PosixSemaphore if _has_posix() else PolledSemaphore
    return kind(buffer, offset, fresh=fresh)


def _has_posix() -> bool:
    with suppress(ValueError, OSError):
        return sys.platform == "linux" and bool(os.confstr("CS_GNU_LIBC_VERSION"))
    return False


_LOCK: Final = threading.Lock()


def fence() -> None:
    """Let no load or store move across this line.

    Taking a lock is an atomic read-modify-write, which x86 orders with everything;
    on ARM it is nearly so, and a missed wake-up there costs one look's interval.
    """
    with _LOCK:
        pass
