"""Figures of a run: estimates and paired ratios, by experiment and label."""

from collections.abc import Mapping
from typing import Any, final

from harness.estimates import Estimate


class MissingError(LookupError):
    """A figure was not measured; the message says why."""


@final
class Reading:
    """A run's JSON, asked for figures."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        """Take what `harness.results.load` returns."""
        self.data = results
        self.experiments: Mapping[str, Any] = results["experiments"]

    @property
    def run(self) -> Mapping[str, Any]:
        """Return what the last part of the run ran on."""
        last: Mapping[str, Any] = self.data["runs"][-1]
        return last

    def names(self, prefix: str) -> list[str]:
        """Return the experiments whose name begins so and that were measured."""
        experiments = self.experiments.items()
        return [
            n for n, e in experiments if n.startswith(prefix) and e["status"] == "ok"
        ]

    def labels(self, experiment: str) -> list[str]:
        """Return the systems of an experiment that have windows."""
        systems = self.experiments.get(experiment, {}).get("systems", {})
        return [label for label, entry in systems.items() if entry["windows"]]

    def entry(self, experiment: str, label: str) -> Mapping[str, Any]:
        """Return what was found about a system.

        Raises:
            MissingError: if it was not measured.
        """
        record = self.experiments.get(experiment)
        if record is None:
            raise MissingError(f"{experiment} was not measured")
        if record["status"] != "ok":
            lines = record["reason"].strip().splitlines() or ["for no known reason"]
            raise MissingError(f"{experiment} {record['status']}: {lines[-1]}")
        entry: Mapping[str, Any] | None = record["systems"].get(label)
        if entry is None:
            raise MissingError(f"{experiment} has no {label}")
        if not entry["windows"]:
            raise MissingError(entry["error"] or f"{label} has no window")
        return entry

    def values(self, experiment: str, label: str, field: str = "rate") -> list[float]:
        """Return a figure of every window.

        Raises:
            MissingError: if there is none.
        """
        windows = self.entry(experiment, label)["windows"]
        values = [w.get(field) for w in windows]
        if any(value is None for value in values):
            raise MissingError(f"{experiment}, {label}: a window without {field}")
        return [float(value) for value in values]

    def estimate(self, experiment: str, label: str, field: str = "rate") -> Estimate:
        """Return the median of a figure over the windows."""
        return Estimate.of(self.values(experiment, label, field))

    def ratio(
        self, experiment: str, ours: str, other: str, field: str = "rate"
    ) -> Estimate:
        """Return the median of a ratio over the rounds, window against window."""
        values = (self.values(experiment, label, field) for label in (ours, other))
        return Estimate.of_ratios(*values)

    def fastest(self, experiment: str, prefix: str) -> str:
        """Return the fastest of the systems whose label begins so.

        Raises:
            MissingError: if there is none.
        """
        labels = self.labels(experiment)
        matching = [label for label in labels if label.startswith(prefix)]
        if not matching:
            self.entry(experiment, prefix)
            raise MissingError(f"{experiment} has no {prefix}")
        return max(matching, key=lambda label: self.estimate(experiment, label).median)

    def cpu_per_frame(self, experiment: str, label: str) -> list[float]:
        """Return processor seconds per frame of every window."""
        cpu = self.values(experiment, label, "cpu_seconds")
        frames = self.values(experiment, label, "frames")
        return [c / f for c, f in zip(cpu, frames, strict=True)]

    def cpu_ratio(self, experiment: str, ours: str, other: str) -> Estimate:
        """Return the median of a ratio of processor seconds per frame."""
        costs = (self.cpu_per_frame(experiment, label) for label in (ours, other))
        return Estimate.of_ratios(*costs)
