"""Several systems, measured in turn: A B C, C B A, and so on.

Whatever slows the machine slows all of them, and ratios are taken within a round. A
system that fails or times out is recorded and dropped.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from harness.served import FailedError, Served, System
from harness.windows import Answer

START_SECONDS = 180.0
"""Until a system must be ready."""

SLACK_SECONDS = 60.0
"""Until the answer about a window must be there, beyond the window itself."""

Say = Callable[[str], None]


@final
@dataclass
class Entry:
    """What was found about one system.

    Attributes:
        system: what ran, as plain data.
        windows: the raw answers, one per round.
        ready_seconds: from its start until it answered.
        memory_mb: proportional set size of all its processes, at the end.
        error: why it left; empty if it did not.
    """

    system: dict[str, Any]
    windows: list[Answer] = field(default_factory=list)
    ready_seconds: float = 0.0
    memory_mb: float = 0.0
    error: str = ""


def contest(
    systems: Mapping[str, System],
    rounds: int,
    seconds: float,
    say: Say,
) -> dict[str, dict[str, Any]]:
    """Measure all systems in alternating order.

    Args:
        systems: by label.
        rounds: how many windows each gets, after one short window that is not kept.
        seconds: of a window.
        say: told what happens.

    Returns:
        What was found about each, as plain data.
    """
    entries = {label: Entry(system.plain()) for label, system in systems.items()}
    running: dict[str, Served] = {}
    # All start at once, which is why their times of starting are not compared.
    with contextlib.ExitStack() as stack:
        starting = {label: Served(system) for label, system in systems.items()}
        for served in starting.values():
            stack.callback(served.close)
        for label, served in starting.items():
            with _leaves(served, label, entries[label], running, say):
                entries[label].ready_seconds = served.wait_until_ready(START_SECONDS)
                served.measure(min(0.5, seconds), SLACK_SECONDS)
                served.pause()
                running[label] = served
        for repetition in range(rounds):
            order = list(running.items())
            for label, served in order if repetition % 2 == 0 else order[::-1]:
                with _leaves(served, label, entries[label], running, say):
                    result = served.measure(seconds, seconds + SLACK_SECONDS)
                    entries[label].windows.append(result)
        for label, served in running.items():
            entries[label].memory_mb = served.memory_mb()
    return {label: vars(entry) for label, entry in entries.items()}


@contextlib.contextmanager
def _leaves(
    served: Served, label: str, entry: Entry, running: dict[str, Served], say: Say
) -> Iterator[None]:
    """End a system that fails: what hangs may also burn a processor."""
    try:
        yield
    except FailedError as error:
        entry.error = str(error)
        say(f"{label} leaves: {error}")
        running.pop(label, None)
        served.close(0.0)
