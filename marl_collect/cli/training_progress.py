"""Live display of training: frames, speed and time left of all runs, and the losses."""

import math
import time
from pathlib import Path
from typing import Self, final

from rich.console import Console, Group, RenderableType

from marl_collect.cli.progress import line, progress_bar, remaining
from marl_collect.files.log_file import add_line
from marl_collect.programs.interruption import FINISHING
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.learner import NotFiniteError
from marl_collect.training.options import Setup
from marl_collect.training.trainer import Watcher

_LINE_SECONDS = 60.0  # Between lines where there is no live display.
_SHOWN = ("loss_objective", "loss_critic", "entropy", "loss", "epsilon")


@final
class TrainingProgress(Watcher):
    """Displays all runs together, and prints a line for each run and evaluation.

    Without a terminal, only the lines are printed; see ``progress.live``.

    Args:
        console: for the lines.
        runs: number of runs.
        frames: of each run.
        log: file for the same lines, with a line a minute.
    """

    def __init__(self, console: Console, runs: int, frames: int, log: Path) -> None:
        self._console = console
        self._log = log
        self._runs = runs
        self._frames = frames
        self._begun = 0
        self._name = ""
        self._metrics = ""
        self._done = 0
        """Frames of the current run."""
        self._last: int | None = None
        """Frames of the current run at the last call, None before the first."""
        self._trained = 0
        """Frames that this command trained with: a resumed run has more."""
        self._begin = time.monotonic()
        self._printed = time.monotonic()

    def begin(self, setup: Setup, seed: int) -> Self:
        """Display this run from now on."""
        self._begun += 1
        self._name = f"{setup.name}, seed {seed} ({self._begun}/{self._runs})"
        self._done, self._last, self._metrics = 0, None, ""
        self._print(self._name)
        return self

    def progress(self, frames: int, row: dict[str, float]) -> None:
        """Display losses and recent returns after a batch."""
        if self._last is not None:
            self._trained += frames - self._last
        self._last = frames
        self._done = min(frames, self._frames)
        shown = [
            f"{name.removeprefix('loss_')} {row[name]:.3g}"
            for name in _SHOWN
            if math.isfinite(row.get(name, math.nan))
        ]
        self._metrics = "  ".join([f"return {row['return_team']:.1f}", *shown])
        now = time.monotonic()
        if now - self._printed > _LINE_SECONDS:
            self._printed = now
            text = f"  {frames:,} frames: {self._metrics}"
            self._print(text, shown=not self._console.is_terminal)

    def interrupted(self) -> None:
        """Print that the run ends soon."""
        self._print(FINISHING)

    def evaluated(self, record: EvaluationRecord) -> None:
        """Print an evaluation."""
        self._last = record.frames
        self._print(
            f"  {record.frames:,} frames: return {record.team:,.2f} (team), "
            f"{record.agent:,.2f} (agent), {record.length:,.0f} frames per episode"
        )

    def failed(self, error: NotFiniteError) -> None:
        """Print why this run ends."""
        self._print(f"  {error}")

    def _print(self, text: str, *, shown: bool = True) -> None:
        if shown:
            self._console.print(text, soft_wrap=True)
        add_line(self._log, text)

    def __rich__(self) -> RenderableType:
        """Return what to draw now."""
        total = self._runs * self._frames
        done = max(self._begun - 1, 0) * self._frames + self._done
        rate = self._trained / max(time.monotonic() - self._begin, 1e-9)
        left = (total - done) / rate if rate else None
        bar = progress_bar(done, total, "frames", rate, remaining(left))
        # Losses come last, because a narrow terminal cuts the end.
        run = f"{self._name}: {self._done:,} frames  {self._metrics}"
        return Group(bar, line(run))
