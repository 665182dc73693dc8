"""Spinning before blocking, for as long as it pays."""

import os
import time
from typing import Final, final

from marl_collect.parallel_env.semaphore import Semaphore

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
