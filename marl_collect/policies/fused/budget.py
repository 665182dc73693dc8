"""Weighs the cost of recording a policy again against the time that it saves."""

from typing import final

_FREE = 10
"""Recordings that are always made, so that a few changes act at full speed at once."""


@final
class RecordingBudget:
    """Decides whether a policy is recorded again after its settings or tensors changed.

    A policy may be annealed for ever, with a change in every slot. So further
    recordings must pay: in the next slot, or, if nothing changes any more, as soon as
    the frames since the last change would have paid for it.
    """

    def __init__(self) -> None:
        """Begin without recordings."""
        self._made = 0
        self._called = 0
        self._seconds = self._saving = 0.0

    def change(self) -> None:
        """Note that settings or tensors have changed."""
        self._called = 0

    def allows(self, frames: int) -> bool:
        """Return whether a recording is worth it.

        Args:
            frames: of the next slot. If the answer is no, the policy is called in them.
        """
        self._called += frames
        return self._made < _FREE or self._called * self._saving > self._seconds

    def record(self, seconds: float, saving: float) -> None:
        """Note a recording.

        Args:
            seconds: that it took.
            saving: seconds that it saves in each frame.
        """
        self._made += 1
        self._called = 0
        self._seconds = seconds
        # Other processes slow down measurements: the largest one is the most exact.
        self._saving = max(self._saving, saving)
