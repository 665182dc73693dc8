"""What stands beside the targets: ratios from or to limits, which no target is about.

Direct loops keep nothing, so a ratio to them holds what storing and reading cost
anybody; a ratio to direct loops that store holds only what the framework costs. How far
direct loops are ahead of a peer is as far as anybody could be.
"""

from collections.abc import Iterator
from contextlib import suppress

from experiments import scaling
from experiments.headline import DIRECT, OURS, OURS_LARGE, STORED
from harness.estimates import Estimate
from workloads.table import WORKLOADS

from reporting.reading import BETWEEN, MissingError, Reading

_WAYS = (
    (OURS, BETWEEN, ", between resets"),
    (OURS_LARGE, "rate", ", large batches, with resets"),
)


def beside_targets(reading: Reading) -> Iterator[tuple[str, Estimate]]:
    """Yield what is compared, and the ratio, as far as it was measured."""
    for title, experiment, one, other, field in _ratios(reading):
        try:
            yield title, reading.ratio(experiment, one, other, field)
        except MissingError:
            continue


def _ratios(reading: Reading) -> Iterator[tuple[str, str, str, str, str]]:
    for name in reading.names("headline/"):
        _, workload, policy = name.split("/")
        slow = WORKLOADS[workload].family == "meltingpot"  # Resets take a second.
        ways = _WAYS if slow else ((OURS, "rate", ""),)
        for ours, field, how in ways:
            title = f"MultiSync against direct loops that store: {workload}, {policy}"
            yield title + how, name, ours, STORED, field
    name = f"scaling/lognormal/{scaling.MOST}"
    title = f"{scaling.MOST} sleeping workers, lognormal: MultiAsync of processes alone"
    yield title, name, scaling.OURS_ASYNC, scaling.FREE_SLEEPERS, "rate"
    for name in reading.names("puffer/"):
        _, step, workers = name.split("/")
        title = (
            f"direct loops against PufferLib's best, {step} steps, workers: {workers}"
        )
        with suppress(MissingError):
            yield title, name, DIRECT, reading.fastest(name, "PufferLib"), "rate"
