"""Semaphores in shared memory, to sleep until another process posts.

Posting a POSIX semaphore without a waiter and taking a post need tens of nanoseconds
and no system call. We place the semaphore in our memory and let the standard library's
``SemLock`` operate on it, whose methods cost a hundredth of a foreign function call.
``wait`` spins before it sleeps, for as long as that pays.
"""

import _multiprocessing  # type: ignore[import-not-found]
import ctypes
import os
import time
from typing import Any, Final, final

NBYTES: Final = 64
"""Bytes of a semaphore: a cache line of its own."""

_COUNTING: Final = 1
_MOST: Final = 2**31 - 1
_MOST_MISSES: Final = 6


@final
class Semaphore:
    """A counter of posts that have not been taken, in shared memory.

    It is a POSIX semaphore of the C library, which may lie at any address.
    """

    def __init__(
        self, buffer: Any, offset: int, *, fresh: bool, spin: float = 0.0
    ) -> None:
        """Use the memory of ``buffer`` at ``offset``, a multiple of ``NBYTES``.

        Args:
            buffer: shared memory; stays mapped as long as the semaphore lives.
            offset: position in ``buffer``.
            fresh: whether to initialise it, or else to join an existing one.
            spin: seconds to spin before sleeping in ``wait``; 0 to sleep at once.
        """
        self._memory = (ctypes.c_char * NBYTES).from_buffer(buffer, offset)
        address = ctypes.addressof(self._memory)
        libc = ctypes.CDLL(None, use_errno=True)
        if fresh and libc.sem_init(ctypes.c_void_p(address), 1, 0):
            code = ctypes.get_errno()
            raise OSError(
                code,
                "ParallelEnv needs semaphores that processes share, but sem_init "
                f"failed: {os.strerror(code)}. Use SerialEnv, or a C library that has "
                "them",
            )
        # The standard library opens its own named semaphores in this way.
        rebuild = _multiprocessing.SemLock._rebuild  # noqa: SLF001 - there is no public name
        lock = rebuild(address, _COUNTING, _MOST, None)
        self.post = lock.release
        """Wake a sleeper, or let the next one continue without sleeping."""
        self._acquire = lock.acquire
        self._spin = spin
        self._misses = 0
        self._asleep = 0  # Remaining waits that sleep at once.

    def acquire(self) -> bool:
        """Take a post if there is one, without sleeping; return whether there was."""
        return self._acquire(False)

    def sleep(self, seconds: float) -> bool:
        """Take a post; sleep for at most ``seconds`` until there is one.

        Releases the interpreter lock.

        Returns:
            Whether there was a post.
        """
        return self._acquire(True, seconds)

    def wait(self, seconds: float) -> bool:
        """Spin, then sleep for at most ``seconds``, until there is a post; take it.

        Spinning, with a yield between two checks, avoids the wake-up latency. Waking a
        sleeper takes tens of microseconds if its processor sleeps too, as in a virtual
        machine. Spinning is wasted if the wait takes longer than ``spin``. So after two
        misses in a row, the next 2 waits sleep at once, then 6, 14, and at most 62.

        Returns:
            Whether there was a post.
        """
        if not self._spin:
            return self.sleep(seconds)
        if self._asleep:
            self._asleep -= 1
            return self.sleep(seconds)
        end = time.perf_counter() + self._spin
        while not self.acquire():
            if time.perf_counter() > end:
                self._misses = min(self._misses + 1, _MOST_MISSES)
                self._asleep = 2**self._misses - 2
                return self.sleep(seconds)
            os.sched_yield()
        self._misses = 0
        return True
