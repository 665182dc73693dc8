"""Live display of training: frames, losses and returns of each run."""

import math
from typing import TYPE_CHECKING, Self, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from marl_collect.training.evaluating import EvaluationRecord
    from marl_collect.training.options import Setup

_SHOWN = ("loss_objective", "loss_critic", "entropy", "loss", "epsilon")


@final
class TrainingProgress:
    """Displays the run that is training, and prints a line for each evaluation.

    Args:
        console: to draw on; without a terminal only the lines are printed.
        runs: number of runs.
        frames: of each run.
    """

    def __init__(self, console: Console, runs: int, frames: int) -> None:
        self._console = console
        self._runs = runs
        self._frames = frames
        self._begun = 0
        self._name = ""
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}", style="dim"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def begin(self, setup: "Setup", seed: int) -> Self:
        """Display this run from now on."""
        self._begun += 1
        self._name = f"{setup.name}, seed {seed} ({self._begun}/{self._runs})"
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(self._name, total=self._frames, metrics="")
        return self

    def progress(self, frames: int, row: dict[str, float]) -> None:
        """Display losses and recent returns after a batch."""
        assert self._task is not None
        shown = [
            f"{name.removeprefix('loss_')} {row[name]:.3g}"
            for name in _SHOWN
            if math.isfinite(row.get(name, math.nan))
        ]
        metrics = f"return {row['return_team']:.1f}  " + "  ".join(shown)
        self._bar.update(self._task, completed=frames, metrics=metrics)

    def evaluated(self, record: "EvaluationRecord") -> None:
        """Print an evaluation."""
        self._console.print(
            f"{self._name}: {record.frames:,} frames, return of the team "
            f"{record.team:.2f}, per agent {record.agent:.2f}, "
            f"{record.length:.0f} frames per episode",
            highlight=False,
            soft_wrap=True,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
