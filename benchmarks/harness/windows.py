"""What a system counts in a window, with and without what resets cost."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Answer = dict[str, Any]
BETWEEN = "rate_between"
"""The field with the frames per second of what lay between resets."""

Measure = Callable[[float], Answer]
"""Run for so many seconds; return figures."""


@dataclass
class Window:
    """Frames and seconds, of everything and of what lay between resets.

    Attributes:
        frames: steps of an environment, however many agents act.
        seconds: that they took, resets included.
        frames_between: of the parts of the window in which nobody was reset.
        seconds_between: that these parts took.
        episodes: that ended.
        own_cpu: processor seconds of the process that asks for the batches.
    """

    frames: int = 0
    seconds: float = 0.0
    frames_between: int = 0
    seconds_between: float = 0.0
    episodes: int = 0
    own_cpu: float = 0.0

    def add(self, frames: int, seconds: float, episodes: int, *, reset: bool) -> None:
        """Count a part of the window, such as a batch."""
        self.frames += frames
        self.seconds += seconds
        self.episodes += episodes
        if not reset:
            self.frames_between += frames
            self.seconds_between += seconds

    def answer(self) -> Answer:
        """Return it as plain data, with frames per second."""
        fields = asdict(self)
        fields["rate"] = self.frames / self.seconds
        between = self.seconds_between
        fields[BETWEEN] = self.frames_between / between if between else None
        return fields


def measure_parts(measure_part: Callable[[], tuple[int, int, bool]]) -> Measure:
    """Return a measure that repeats ``measure_part``.

    ``measure_part`` returns the frames, the episodes, and whether there was a reset.
    """

    def measure(seconds: float) -> Answer:
        window = Window()
        cpu = time.process_time()
        begin = end = time.perf_counter()
        while end - begin < seconds:
            frames, episodes, reset = measure_part()
            before, end = end, time.perf_counter()
            window.add(frames, end - before, episodes, reset=reset)
        window.own_cpu = time.process_time() - cpu
        return window.answer()

    return measure


def together(answers: list[Answer]) -> Answer:
    """Return one answer for processes that ran at once: rates add up."""
    if len(answers) == 1:
        return answers[0]
    out: Answer = {}
    for name in answers[0]:
        values = [answer[name] for answer in answers]
        if any(value is None for value in values):
            out[name] = None
        elif name.startswith("seconds"):
            out[name] = max(values)
        else:
            out[name] = sum(values)
    return out
