"""One experiment: systems that are measured together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, final

from harness.budget import BESIDE, Cost
from harness.contest import Say, contest
from harness.estimates import beside_the_others
from harness.served import System

_GRID_ROUNDS = 5
_GRID_SECONDS = 1.0
_START_SECONDS = 11.0
"""That starting and ending one candidate takes, about, with others beside it."""


@final
@dataclass(frozen=True)
class Experiment:
    """Systems that are measured together, window by window in turn.

    Attributes:
        name: as in the results; the part before the first ``/`` is its kind.
        title: what it is about.
        systems: by label.
        rounds: windows of each.
        start_seconds: that starting and ending all of them takes, about.
        candidates: for a label, the systems of which the fastest takes its place;
            found before, with a few windows of each in turn.
        fastest_by: for a label, the field that says which is; "rate" if not named.
        least_window: seconds; longer than others where a batch takes long.
        notes: further plain data that a reader of the results needs.
    """

    name: str
    title: str
    systems: Mapping[str, System]
    rounds: int
    start_seconds: float = 10.0
    candidates: Mapping[str, Mapping[str, System]] = field(default_factory=dict)
    fastest_by: Mapping[str, str] = field(default_factory=dict)
    least_window: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """Seconds of the experiment, and how they depend on its window."""
        grids = sum(len(grid) for grid in self.candidates.values())
        grid_seconds = _START_SECONDS + _GRID_ROUNDS * (self._grid_seconds + BESIDE)
        fixed = self.start_seconds + grids * grid_seconds
        systems = {*self.systems, *self.candidates}
        windows = self.rounds * len(systems)
        return Cost(fixed, windows, self.least_window)

    @property
    def _grid_seconds(self) -> float:
        return max(_GRID_SECONDS, self.least_window / 2)

    def run(self, window: float, say: Say) -> dict[str, Any]:
        """Measure, and return plain data."""
        systems = dict(self.systems)
        grids: dict[str, Any] = {}
        for label, candidates in self.candidates.items():
            rate = self.fastest_by.get(label, "rate")
            grids[label] = grid = self._grid(candidates, rate, window, say)
            if grid["best"] is not None:
                systems[label] = candidates[grid["best"]]
        window = max(window, self.least_window)
        return {
            "window": window,
            "rounds": self.rounds,
            "grids": grids,
            "systems": contest(systems, self.rounds, window, say),
            "notes": dict(self.notes),
        }

    def _grid(
        self, candidates: Mapping[str, System], rate: str, window: float, say: Say
    ) -> dict[str, Any]:
        seconds = min(self._grid_seconds, max(window, self.least_window))
        entries = contest(candidates, _GRID_ROUNDS, seconds, say)
        errors = {name: e["error"] for name, e in entries.items() if e["error"]}
        window_rates = {
            name: [window_result[rate] for window_result in entry["windows"]]
            for name, entry in entries.items()
            if not entry["error"]
        }
        speeds = beside_the_others(window_rates)
        best = max(speeds, key=speeds.__getitem__) if speeds else None
        completed = {
            n: [value for value in window_rates[n] if value is not None] for n in speeds
        }
        rates = {
            name: median(completed[name]) if name in completed else None
            for name in entries
        }
        return {"rates": rates, "errors": errors, "best": best, "by": rate}
