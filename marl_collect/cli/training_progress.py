"""Live display of training: frames, speed and time left of all runs, and the losses."""

import math
import time
from pathlib import Path
from typing import final

from rich.console import Console, Group, RenderableType

from marl_collect.cli.progress import line, progress_bar, remaining
from marl_collect.errors import worker_error_of
from marl_collect.files.log_file import add_line
from marl_collect.programs.interruption import FINISHING
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.learner import NotFiniteError
from marl_collect.training.options import Setup
from marl_collect.training.trainer import Watcher

_LINE_SECONDS = 60.0  # Between lines where there is no live display.
_SHOWN = ("loss_objective", "loss_critic", "entropy", "loss", "epsilon")


@final
class TrainingProgress:
    """Displays all runs together, and prints a line for each run and evaluation.

    Without a terminal, only the lines are printed; see ``progress.live``.

    Args:
        console: for the lines.
        runs: number of runs.
        frames: of all runs.
        log: file for the same lines, with a line a minute.
        side_by_side: whether every line begins with the name of its run.
    """

    def __init__(
        self,
        console: Console,
        runs: int,
        frames: int,
        log: Path,
        *,
        side_by_side: bool = False,
    ) -> None:
        self._console = console
        self._log = log
        self._runs = runs
        self._frames = frames
        self._side_by_side = side_by_side
        self._begun = 0
        self._training: list[_RunProgress] = []
        """Runs that have begun and not ended."""
        self._ended = 0
        """Frames of the runs that have."""
        self._begin = time.monotonic()
        self.trained = 0
        """Frames that this command trained with: a resumed run has more."""

    def begin(self, setup: Setup, seed: int, frames: int) -> "_RunProgress":
        """Display another run from now on.

        Args:
            setup: of the run.
            seed: of the run.
            frames: number of frames that it trains with.
        """
        self._begun += 1
        name = f"{setup.name}, seed {seed}"
        run = _RunProgress(self, f"{name} ({self._begun}/{self._runs})", frames)
        run.prefix = f"{name}:" if self._side_by_side else " "
        self._training.append(run)
        self.print(run.name)
        return run

    def end(self, run: "_RunProgress") -> None:
        """Display a run no longer."""
        self._training.remove(run)
        self._ended += run.frames

    def print(self, text: str, *, shown: bool = True) -> None:
        """Write a line to the log, and print it."""
        if shown:
            self._console.print(text, soft_wrap=True)
        add_line(self._log, text)

    @property
    def is_live(self) -> bool:
        """Whether there is a live display."""
        return self._console.is_terminal

    def __rich__(self) -> RenderableType:
        """Return what to draw now."""
        done = self._ended + sum(run.done for run in self._training)
        rate = self.trained / max(time.monotonic() - self._begin, 1e-9)
        left = (self._frames - done) / rate if rate else None
        bar = progress_bar(done, self._frames, "frames", rate, remaining(left))
        # Losses come last, because a narrow terminal cuts the end.
        return Group(
            bar,
            *(
                line(f"{run.name}: {run.done:,} frames  {run.metrics}")
                for run in self._training
            ),
        )


@final
class _RunProgress(Watcher):
    """The progress of one run.

    Args:
        all_runs: the display.
        name: of the run.
        frames: number of frames that it trains with.
    """

    def __init__(self, all_runs: TrainingProgress, name: str, frames: int) -> None:
        self._all_runs = all_runs
        self.name = name
        self.frames = frames
        self.prefix = " "
        """Begins each line after the first."""
        self.done = 0
        self.metrics = ""
        self._last: int | None = None
        """Frames at the last call, None before the first."""
        self._printed = time.monotonic()

    def progress(self, frames: int, row: dict[str, float]) -> None:
        """Display losses and recent returns after a batch."""
        if self._last is not None:
            self._all_runs.trained += frames - self._last
        self._last = frames
        self.done = min(frames, self.frames)
        shown = [
            f"{name.removeprefix('loss_')} {row[name]:.3g}"
            for name in _SHOWN
            if math.isfinite(row.get(name, math.nan))
        ]
        self.metrics = "  ".join([f"return {row['return_team']:.1f}", *shown])
        now = time.monotonic()
        if now - self._printed > _LINE_SECONDS:
            self._printed = now
            text = f"{self.prefix} {frames:,} frames: {self.metrics}"
            self._all_runs.print(text, shown=not self._all_runs.is_live)

    def interrupted(self) -> None:
        """Print that the run ends soon."""
        self._all_runs.print(FINISHING)

    def evaluated(self, record: EvaluationRecord) -> None:
        """Print an evaluation."""
        self._last = record.frames
        self._all_runs.print(
            f"{self.prefix} {record.frames:,} frames: return {record.team:,.2f} "
            f"(team), {record.agent:,.2f} (agent), {record.length:,.0f} frames per "
            "episode"
        )

    def finished(self) -> None:
        """Count all frames of the run."""
        self._all_runs.end(self)

    def failed(self, error: Exception) -> None:
        """Print why this run ends; the log gets the traceback of its process."""
        first, *_ = str(error).strip().splitlines() or [""]
        known = isinstance(error, NotFiniteError)
        cause = first if known else f"{type(error).__name__}: {first}"
        self._all_runs.print(f"{self.prefix} {cause}")
        worker = worker_error_of(error)
        if worker is not None and not known:
            self._all_runs.print(str(worker), shown=False)
        self._all_runs.end(self)
