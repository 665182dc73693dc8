"""A clock that a test sets forward, in place of pauses that it would wait for."""

import time
from typing import Final


class LeapingClock:
    """Replaces ``time.monotonic`` in this process; other processes do not see it.

    Use it with ``monkeypatch.setattr(time, "monotonic", clock.monotonic)``.
    """

    def __init__(self) -> None:
        self._real: Final = time.monotonic
        self._ahead = 0.0

    def monotonic(self) -> float:
        """Return the seconds of the real clock, plus those that were leapt over."""
        return self._real() + self._ahead

    def leap(self, seconds: float) -> None:
        """Let that many seconds pass at once."""
        self._ahead += seconds
