"""How long a window may be, so that all experiments fit the time there is."""

import time
from dataclasses import dataclass
from typing import final

LONGEST = 5.0
SHORTEST = 0.5
BESIDE = 0.5
"""Seconds that a window takes beside itself: some wake up before, batches end late."""


@final
@dataclass(frozen=True)
class Cost:
    """What an experiment takes: seconds whatever the window, and windows.

    Attributes:
        fixed: seconds of starting, ending, and of what is no window.
        windows: how many windows.
        least: seconds that a window takes at least.
    """

    fixed: float
    windows: int
    least: float = 0.0

    def seconds(self, window: float) -> float:
        """Return the seconds of the experiment with windows of this length."""
        return self.fixed + self.windows * (max(window, self.least) + BESIDE)


@final
class Budget:
    """Shares the time that is left among the experiments that are left."""

    def __init__(self, minutes: float) -> None:
        """Let the time run from now on.

        Args:
            minutes: to share.
        """
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def window(self, ahead: list[Cost]) -> float:
        """Return the seconds of a window, given what is still to be done."""
        seconds_left, step = self.left(), 0.1
        window = LONGEST
        while (
            window > SHORTEST and sum(c.seconds(window) for c in ahead) > seconds_left
        ):
            window -= step
        return max(SHORTEST, window)
