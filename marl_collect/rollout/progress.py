"""What a rollout reports while it runs."""

from typing import final

from marl_collect.processes.status_board import (
    ENVIRONMENT,
    PHASE,
    PREEMPT,
    REPLAYED,
    STEPS,
    STOP,
    Line,
    Phase,
)

_STEP = int(Phase.STEP)
_POLICY = int(Phase.POLICY)
_COMMAND = int(Phase.COMMAND)


class ProgressReporter:
    """Receives what a rollout is doing; this one counts steps and never stops early.

    Attributes:
        steps: number of steps so far; each steps all environments.
    """

    steps = 0

    def resetting(self, environment: int) -> None:
        """Report that environment ``environment`` begins an episode."""

    def acting(self) -> None:
        """Report that the policy acts."""

    def stepping(self) -> None:
        """Report that the environments step."""
        self.steps += 1

    def replaying(self) -> None:
        """Report that recorded episodes are about to make a step."""

    def preempted(self) -> bool:
        """Return whether the rollout must end after this frame."""
        return False


@final
class LineProgress(ProgressReporter):
    """Records on the status board what a rollout is doing."""

    def __init__(self, line: Line, environments: int) -> None:
        """Write to the worker's line of the status board."""
        self._line = line
        self._cells = line.cells
        self._several = environments > 1

    def resetting(self, environment: int) -> None:
        """Note that ``environment`` begins an episode."""
        self._line.enter(Phase.RESET, environment)

    def acting(self) -> None:
        """Note that the policy acts."""
        self._cells[PHASE] = _POLICY
        if self._several:
            self._cells[ENVIRONMENT] = 0  # No environment; the last reset is done.

    def stepping(self) -> None:
        """Note that the environments step, and count it."""
        cells = self._cells
        cells[PHASE] = _STEP
        cells[STEPS] += 1

    def replaying(self) -> None:
        """Note that recorded episodes make a step."""
        cells = self._cells
        cells[PHASE] = _COMMAND
        cells[REPLAYED] += 1

    def preempted(self) -> bool:
        """Return whether the trainer wants the rollout or the worker to end."""
        cells = self._cells
        return cells[PREEMPT] != 0 or cells[STOP] != 0
