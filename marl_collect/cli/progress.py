"""Live display of a collection: frames, speed, episodes and returns."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from marl_collect.errors import counted

if TYPE_CHECKING:
    from marl_collect.storage import EndedEpisode

_PER_SECOND = 8
"""How often a display is drawn."""

_RECENT = 100
_WINDOW = 5.0
"""Seconds over which the displayed speed is averaged."""

_LINE = 8
"""Groups with more agents than this show one mean return instead of one per agent."""


def live(display: RenderableType, console: Console) -> AbstractContextManager[object]:
    """Draw a display again and again in a ``with`` block, in a thread of rich.

    Nothing is drawn if the console is no terminal.
    """
    if not console.is_terminal:
        return nullcontext()
    return Live(
        display, console=console, refresh_per_second=_PER_SECOND, transient=True
    )


def progress_bar(done: int, total: int, unit: str, speed: float, left: str) -> Table:
    """Return a line with numbers and a bar, which gets what the numbers leave."""
    bar = Table.grid(padding=(0, 1), expand=True)
    for _ in range(3):
        bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_row(
        Text(f"{done:,}/{total:,} {unit}", "green"),
        Text(f"{speed:,.0f} frames/s", "cyan"),
        Text(f"{left} left"),
        ProgressBar(total=total, completed=done, width=None),
    )
    return bar


@final
class ProgressDisplay:
    """Displays a running collection, where ``live`` draws it.

    The drawing thread calls ``frames`` for the frames so far. Episodes may be added
    from any thread.
    """

    def __init__(
        self,
        task: str,
        total: int,
        unit: Literal["frames", "episodes"] = "frames",
    ) -> None:
        """Prepare the display.

        Args:
            task: name to display.
            total: frames or episodes to collect.
            unit: unit of ``total``.
        """
        self._task = task
        self._total = total
        self._unit = unit
        self._frames: Callable[[], int] | None = None
        self._marks: deque[tuple[float, int]] = deque()
        self._begin: float | None = None
        self._episodes = 0
        self._recent: deque[EndedEpisode] = deque(maxlen=_RECENT)
        self._spinner = Spinner("dots", Text(f"{task}: starting"))

    def say(self, what: str) -> None:
        """Display what happens before the first frame."""
        self._spinner.update(text=Text(f"{self._task}: {what}"))

    def count(self, frames: Callable[[], int]) -> None:
        """Display frames from now on, by calling ``frames``."""
        self._frames = frames

    def convert(self, done: int, total: int, ended: "Sequence[EndedEpisode]") -> None:
        """Display ``done`` of ``total`` frames, and add episodes."""
        self._total = total
        self.count(lambda: done)
        self.add(ended)

    def add(self, ended: "Sequence[EndedEpisode]") -> None:
        """Add episodes that ended."""
        self._episodes += len(ended)
        self._recent.extend(ended)

    def __rich__(self) -> RenderableType:
        """Return what to draw now."""
        if self._frames is None:
            return self._spinner
        frames, episodes = self._frames(), self._episodes
        of_frames = self._unit == "frames"
        done = min(frames if of_frames else episodes, self._total)
        other = counted(*((episodes, "episode") if of_frames else (frames, "frame")))
        left = remaining(self._left(done))
        speed = self._speed(frames)
        bar = progress_bar(done, self._total, self._unit, speed, left)
        parts: list[RenderableType] = [bar, line(f"{self._task}: {other}")]
        recent = list(self._recent)
        if recent:
            parts.append(line(returns_line(recent)))
        return Group(*parts)

    def _left(self, done: int) -> float | None:
        """Return the remaining seconds at the mean speed so far, None if unknown."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = now
        if done <= 0:
            return None
        return (now - self._begin) / done * (self._total - done)

    def _speed(self, frames: int) -> float:
        now = time.monotonic()
        self._marks.append((now, frames))
        while len(self._marks) > 2 and now - self._marks[1][0] > _WINDOW:
            self._marks.popleft()
        begin, before = self._marks[0]
        return (frames - before) / (now - begin) if now > begin else 0.0


def remaining(seconds: float | None) -> str:
    """Return a duration as ``m:ss`` or ``h:mm:ss``, ``-:--`` for None."""
    if seconds is None:
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def line(text: str) -> Text:
    """Return one line of a display, which ends with an ellipsis if it is too long."""
    return Text(text, "dim", no_wrap=True, overflow="ellipsis")


def returns_line(episodes: "Sequence[EndedEpisode]") -> str:
    """Return the mean returns of ``episodes``: of the team, then of each agent."""
    count = len(episodes)
    team = sum(episode.team_return for episode in episodes) / count
    parts = [f"mean return of the last {counted(count, 'episode')}: team {team:.2f}"]
    for name in episodes[0].returns:
        rows = zip(*(episode.returns[name] for episode in episodes), strict=True)
        means = [sum(row) / count for row in rows]
        if len(means) > _LINE:
            parts.append(f"{name} {sum(means) / len(means):.2f} per agent")
        else:
            parts.append(f"{name} {' '.join(f'{mean:.2f}' for mean in means)}")
    return " · ".join(parts)
