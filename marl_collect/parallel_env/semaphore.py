"""Semaphores in shared memory, to sleep until another process posts.

On Linux this is a POSIX semaphore. Posting without a waiter and taking a post need tens
of nanoseconds and no system call. We place the semaphore in our memory and let the
standard library's ``SemLock`` operate on it, whose methods cost a hundredth of a
foreign function call. Other systems poll every 0.2 ms. ``SpinWait`` spins before it
sleeps, for as long as that pays.
"""

import _multiprocessing  # type: ignore[import-not-found]
import ctypes
import os
import sys
import time
from contextlib import suppress
from typing import Any, Final, Protocol, final

NBYTES: Final = 64
"""Bytes of a semaphore: a cache line of its own."""

_COUNTING: Final = 1
_MOST: Final = 2**31 - 1
_POLL_SECONDS: Final = 0.0002


class Semaphore(Protocol):
    """A counter of posts that have not been taken, in shared memory."""

    def post(self) -> None:
        """Wake a sleeper, or let the next one continue without sleeping."""
        ...

    def take(self) -> bool:
        """Take a post if there is one, without sleeping; return whether there was."""
        ...

    def sleep(self, seconds: float) -> bool:
        """Take a post; sleep for at most ``seconds`` until there is one.

        Returns:
            Whether there was.
        """
        ...


@final
class PosixSemaphore:
    """A semaphore of the GNU C library, which may lie at any address."""

    def __init__(self, buffer: Any, offset: int, *, fresh: bool) -> None:
        """Use the memory of ``buffer`` at ``offset``, a multiple of ``NBYTES``.

        Args:
            buffer: shared memory; stays mapped as long as the semaphore lives.
            offset: position in ``buffer``.
            fresh: whether to initialise it, or else to join an existing one.
        """
        self._kept = (ctypes.c_char * NBYTES).from_buffer(buffer, offset)
        address = ctypes.addressof(self._kept)
        if fresh and ctypes.CDLL(None).sem_init(ctypes.c_void_p(address), 1, 0):
            raise OSError("The C library could not create a semaphore.")
        # The standard library opens its own named semaphores in this way.
        rebuild = _multiprocessing.SemLock._rebuild  # noqa: SLF001 - there is no public name
        lock = rebuild(address, _COUNTING, _MOST, None)
        self.post = lock.release
        self._acquire = lock.acquire

    def take(self) -> bool:
        """See ``Semaphore``."""
        return self._acquire(False)

    def sleep(self, seconds: float) -> bool:
        """See ``Semaphore``; releases the interpreter lock."""
        return self._acquire(True, seconds)


@final
class PolledSemaphore:
    """A polled number that changes with every post; several posts count as one."""

    def __init__(self, buffer: Any, offset: int, *, fresh: bool) -> None:
        """See ``PosixSemaphore``."""
        self._cell = memoryview(buffer)[offset : offset + 4].cast("I")
        if fresh:
            self._cell[0] = 0
        self._seen = 0

    def post(self) -> None:
        """See ``Semaphore``; sleepers poll."""
        self._cell[0] = (self._cell[0] + 1) & 0xFFFFFFFF

    def take(self) -> bool:
        """See ``Semaphore``."""
        seen, self._seen = self._seen, self._cell[0]
        return seen != self._seen

    def sleep(self, seconds: float) -> bool:
        """See ``Semaphore``."""
        end = time.monotonic() + seconds
        while not self.take():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)  # noqa: TID251 - there is nothing to wait on
        return True


def semaphore(buffer: Any, offset: int, *, fresh: bool) -> Semaphore:
    """Return the best semaphore of this system; see ``PosixSemaphore``."""
    kind = PosixSemaphore if _has_posix() else PolledSemaphore
    return kind(buffer, offset, fresh=fresh)


def _has_posix() -> bool:
    with suppress(ValueError, OSError):
        return sys.platform == "linux" and bool(os.confstr("CS_GNU_LIBC_VERSION"))
    return False


_MOST_MISSES: Final = 6


@final
class SpinWait:
    """Waits on a semaphore: spins first, then sleeps.

    Spinning, with a yield between two checks, avoids the wake-up latency. Waking a
    sleeper takes tens of microseconds if its processor sleeps too, as in a virtual
    machine. Spinning is wasted if the wait takes longer than ``spin``. So after two
    misses in a row, the next 2 waits sleep at once, then 6, 14, and at most 62.
    """

    def __init__(self, posted: Semaphore, spin: float) -> None:
        """Wait on a semaphore.

        Args:
            posted: the semaphore that other processes post.
            spin: seconds to spin before sleeping; 0 to sleep at once.
        """
        self._posted = posted
        self._spin = spin
        self._misses = 0
        self._asleep = 0  # Remaining waits that sleep at once.

    def wait(self, seconds: float) -> bool:
        """Return whether the semaphore was posted within ``seconds`` of sleep."""
        if not self._spin:
            return self._posted.sleep(seconds)
        if self._asleep:
            self._asleep -= 1
            return self._posted.sleep(seconds)
        end = time.perf_counter() + self._spin
        while not self._posted.take():
            if time.perf_counter() > end:
                self._misses = min(self._misses + 1, _MOST_MISSES)
                self._asleep = 2**self._misses - 2
                return self._posted.sleep(seconds)
            os.sched_yield()
        self._misses = 0
        return True
