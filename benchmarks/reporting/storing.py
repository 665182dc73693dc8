"""Ours against direct loops that store: no target, but what is left of one.

Direct loops keep nothing, so a ratio to them holds what storing and reading cost
anybody. These ratios hold only what the framework costs.
"""

from collections.abc import Iterator

from experiments.headline import OURS, OURS_LARGE, STORED
from harness.estimates import Estimate
from workloads.table import WORKLOADS

from reporting.reading import BETWEEN, MissingError, Reading

_WAYS = (
    (OURS, BETWEEN, ", between resets"),
    (OURS_LARGE, "rate", ", large batches, with resets"),
)


def beside_storing(reading: Reading) -> Iterator[tuple[str, Estimate]]:
    """Yield what is compared, and the ratio, as far as it was measured."""
    for name in reading.names("headline/"):
        _, workload, policy = name.split("/")
        slow = WORKLOADS[workload].family == "meltingpot"  # Resets take a second.
        ways = _WAYS if slow else ((OURS, "rate", ""),)
        for ours, field, how in ways:
            try:
                ratio = reading.ratio(name, ours, STORED, field)
            except MissingError:
                continue
            yield f"{workload}, {policy}{how}", ratio
