"""One row of a table of micro-benchmarks: alternatives, and the unit of their work."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

from harness.estimates import Estimate, number
from harness.turns import Alternative

Build = Callable[[ExitStack], Mapping[str, Alternative]]
"""Builds the alternatives, by name; the stack closes what they need."""

_FACTORS = {"us": 1e6, "ms": 1e3, "s": 1.0}


@final
@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: as printed, and as ``--only`` selects it.
        build: builds the alternatives. The others are compared with the first one.
        work: the unit of work, such as ``"frame"``; ``"byte"`` is printed as MB/s.
        per: the unit of time: ``"us"``, ``"ms"`` or ``"s"``.
        clock: of seconds: processor time of this process, or ``time.perf_counter`` if
            calls wait for disks or processes.
    """

    name: str
    build: Build
    work: str = "call"
    per: str = "us"
    clock: Callable[[], float] = time.process_time

    def show(self, seconds: list[float]) -> str:
        """Return the median of seconds per unit of work, as text with its unit."""
        if self.work == "byte":
            rate = Estimate.of([1e-6 / value for value in seconds])
            return f"{number(rate.median)} MB/s"
        estimate = Estimate.of([value * _FACTORS[self.per] for value in seconds])
        return f"{number(estimate.median)} {self.per} per {self.work}"


def collecting(collector: Any) -> Alternative:
    """Return the call that collects a batch and drops it; its work is the frames."""
    return Alternative(lambda: float(collector.next().numel()))
