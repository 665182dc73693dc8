"""The report's tables: rows of plain text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from harness.estimates import number
from harness.windows import BETWEEN
from workloads.table import WORKLOADS

from reporting.limits import beside_targets
from reporting.plots import parent_costs, predicted
from reporting.reading import MissingError, Reading
from reporting.targets import judge

_CORES = (2, 4, 8, 16, 32, 64)
_PREDICTED_US = 1000.0


@final
@dataclass(frozen=True)
class Section:
    """A table with a title.

    Attributes:
        title: heading.
        text: a paragraph above the table.
        head: names of the columns.
        rows: cells; the first is text, the others are set to the right.
    """

    title: str
    text: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def sections(reading: Reading) -> list[Section]:
    """Return all tables of the report."""
    return [
        _targets(reading),
        *_limits(reading),
        *(_contest(reading, name) for name in _contests(reading)),
        *_figures(reading),
        _predictions(reading),
        _grids(reading),
        _failures(reading),
        _peers(reading),
    ]


def _targets(reading: Reading) -> Section:
    rows = [verdict.cells for verdict in judge(reading)]
    head = ("target", "aim", "median (95 % interval)", "verdict", "interval")
    text = (
        "Pass and fail go by the median; the interval is open where it lies on both "
        "sides of the bound."
    )
    return Section("Targets", text, head, rows)


def _limits(reading: Reading) -> Iterator[Section]:
    rows = [(comparison, str(ratio)) for comparison, ratio in beside_targets(reading)]
    text = (
        "No targets. Direct loops keep nothing, so the ratios to them hold what "
        "storing and reading cost anybody; direct loops that store keep every frame as "
        "a collector must, and read every byte of a batch. Nobody can be further ahead "
        "of a peer than direct loops are."
    )
    head = ("what", "median (95 % interval)")
    if rows:
        yield Section("Limits", text, head, rows)


def _contests(reading: Reading) -> Iterator[str]:
    for name in reading.names(""):
        if not name.startswith("figures/"):
            yield name


def _contest(reading: Reading, name: str) -> Section:
    entry = reading.experiments[name]
    labels = reading.labels(name)
    first = labels[0] if labels else ""
    rows = [_system(reading, name, label, first) for label in labels]
    note = " Disturbed: the control loop changed." if entry["disturbed"] else ""
    text = (
        f"{entry['rounds']} windows of {entry['window']:.1f} s each, in turn; control "
        f"loop {entry['control'][1] / entry['control'][0]:.3f} after to before.{note}"
    )
    head = (
        "system",
        "frames/s",
        f"{first} / it",
        "between resets: frames/s",
        f"{first} / it",
        "CPU s per 10^6 agent-steps",
        "asking process, us per frame",
        "PSS, MB",
        "mean episode",
    )
    return Section(entry["title"], text, head, rows)


def _system(reading: Reading, name: str, label: str, first: str) -> tuple[str, ...]:
    entry = reading.entry(name, label)
    windows = entry["windows"]
    frames = sum(w["frames"] for w in windows)
    agents = WORKLOADS[entry["system"]["workload"]].agents
    cpu = sum(w["cpu_seconds"] for w in windows) / frames / agents * 1e6
    own_us = sum(w.get("own_cpu", 0.0) for w in windows) / frames * 1e6
    episodes = sum(w.get("episodes", 0) for w in windows)
    return (
        label + _options(entry["system"]),
        str(reading.estimate(name, label)),
        str(reading.ratio(name, first, label)),
        *_between(reading, name, label, first),
        number(cpu),
        number(own_us) if own_us else "",
        number(entry["memory_mb"]),
        number(frames / episodes) if episodes else "",
    )


def _between(reading: Reading, name: str, label: str, first: str) -> tuple[str, str]:
    try:
        rate = str(reading.estimate(name, label, BETWEEN))
        return rate, str(reading.ratio(name, first, label, BETWEEN))
    except MissingError:
        return "", ""


def _options(system: Mapping[str, Any]) -> str:
    options = {k: v for k, v in system["options"].items() if k not in ("each",)}
    if system["copies"] > 1:
        options = {"processes at once": system["copies"], **options}
    return f" {options}" if options else ""


def _figures(reading: Reading) -> Iterator[Section]:
    for name in reading.names("figures/"):
        experiment = reading.experiments[name]
        rows: list[tuple[str, ...]] = []
        for label in reading.labels(name):
            entry = reading.entry(name, label)
            fields = [f for f in entry["windows"][0] if f != "cpu_seconds"]
            rows += [_figure(reading, name, label, field) for field in fields]
            ready = number(entry["ready_seconds"])
            rows.append((label, "ready_seconds of the process", ready))
        text = f"{experiment['rounds']} windows."
        yield Section(experiment["title"], text, ("of", "figure", "median"), rows)


def _figure(reading: Reading, name: str, label: str, field: str) -> tuple[str, ...]:
    try:
        return (label, field, str(reading.estimate(name, label, field)))
    except MissingError:
        return (label, field, "")


def _predictions(reading: Reading) -> Section:
    rows = []
    if len(parent_costs(reading)) > 1:
        for cores in _CORES:
            share = predicted(reading, _PREDICTED_US, cores)
            rows.append((str(cores), f"{share:.3f}"))
    text = (
        "Not measured. From a straight line p through the trainer's cost per step: "
        "t / max(t, p), for steps of t = 1 ms and one environment per process."
    )
    head = ("cores and processes", "share of ideal speed, predicted")
    return Section("Prediction for ParallelEnv on more cores", text, head, rows)


def _grids(reading: Reading) -> Section:
    rows = []
    for name in reading.names(""):
        for label, grid in reading.experiments[name]["grids"].items():
            for candidate, rate in grid["rates"].items():
                mark = "chosen" if candidate == grid["best"] else ""
                rate_text = "failed" if rate is None else number(rate)
                if rate is not None and grid.get("by") == BETWEEN:
                    rate_text += " between resets"
                rows.append((name, label, candidate, rate_text, mark))
    text = "A few windows each, in turn; the fastest takes part in the comparison."
    head = ("experiment", "for", "configuration", "frames/s", "")
    return Section("Configurations that were tried", text, head, rows)


def _failures(reading: Reading) -> Section:
    rows = [
        (name, label, reason.strip().splitlines()[-1] if reason.strip() else "")
        for name, label, reason in reading.errors()
    ]
    text = "What failed, hung, or found no time." if rows else "Nothing failed."
    return Section("Failures", text, ("experiment", "system", "reason"), rows)


def _peers(reading: Reading) -> Section:
    rows = []
    for name, peer in reading.run["peers"].items():
        versions = ", ".join(f"{k} {v}" for k, v in peer["versions"].items())
        rows.append((name, peer["status"], peer["reason"], versions))
    text = "Made by benchmarks/peers/install.py; TorchRL runs in ours."
    head = ("peer", "installation", "reason", "versions")
    return Section("Environments of the peers", text, head, rows)
