"""Looking again and again before going to sleep, for as long as that pays."""

import os
import time
from typing import Final, final

from marl_collect.parallel_env.semaphore import Semaphore

_MOST_MISSES: Final = 6


@final
class SpinWait:
    """One who waits on a semaphore, time after time.

    To wake a sleeper takes tens of microseconds where its processor has gone to sleep
    too, as it does in a virtual machine. Who looks again and again, and yields between,
    is there at once. That is lost time where what is waited for takes longer: after
    two misses in a row the next 2 waits are spent asleep, then 6, 14, and at most 62.
    """

    def __init__(self, posted: Semaphore, spin: float) -> None:
        """Wait on ``posted``.

        Args:
            posted: what others post.
            spin: seconds to look before going to sleep, 0 to sleep at once.
        """
        self._posted = posted
        self._spin = spin
        self._misses = 0
        self._asleep = 0  # Waits still to be spent so.

    def wait(self, seconds: float) -> bool:
        """Return whether something was posted within ``seconds`` of sleep."""
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
