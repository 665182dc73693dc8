"""What stands beside the targets: ratios from or to limits, which no target is about.

Direct loops keep nothing, so a ratio to them holds what storing and reading cost
anybody; a ratio to direct loops that store holds only what the framework costs. How far
direct loops are ahead of a peer is as far as anybody could be who uses our adapters.
Those that meet at every step are what our ParallelEnv of one group could reach with a
trainer that takes no time; one of two groups meets less often.
"""

from collections.abc import Iterator

from experiments.headline import (
    DIRECT,
    OURS,
    OURS_LARGE,
    OURS_PARALLEL,
    STOCK,
    STORED,
)
from experiments.puffer import LOCKSTEP
from harness.estimates import Estimate
from harness.windows import BETWEEN
from workloads.table import WORKLOADS

from reporting.reading import MissingError, Reading
from reporting.targets import Figure, against_best, cpu_against_best, ratio

_WAYS = (
    (OURS, BETWEEN, ", between resets"),
    (OURS_LARGE, "rate", ", large batches, with resets"),
)


def beside_targets(reading: Reading) -> Iterator[tuple[str, Estimate]]:
    """Yield what is compared, and the ratio, as far as it was measured."""
    for ratios in (_headline, _puffers):
        for title, figure in ratios(reading):
            try:
                yield title, figure(reading)
            except MissingError:
                continue


def _headline(reading: Reading) -> Iterator[tuple[str, Figure]]:
    for name in reading.names("headline/"):
        _, workload, policy = name.split("/")
        slow = WORKLOADS[workload].family == "meltingpot"  # Resets take a second.
        ways = _WAYS if slow else ((OURS, "rate", ""),)
        for ours, field, note in ways:
            yield (
                (
                    "MultiSync against direct loops that store: "
                    f"{workload}, {policy}{note}"
                ),
                ratio(name, ours, STORED, field),
            )
        _, field, note = ways[0]
        for loops, other in (("direct", DIRECT), ("stock", STOCK)):
            yield (
                f"storing direct loops against {loops}: {workload}, {policy}{note}",
                ratio(name, STORED, other, field),
            )
        yield (
            f"direct loops against TorchRL's best: {workload}, {policy}",
            against_best(name, "torchrl", DIRECT),
        )


def _puffers(reading: Reading) -> Iterator[tuple[str, Figure]]:
    for name in reading.names("puffer/"):
        _, step, workers = name.split("/")
        against = f"PufferLib's best, {step} steps, workers: {workers}"
        yield f"direct loops against {against}", against_best(name, "PufferLib", DIRECT)
        yield (
            f"direct loops that meet at every step against {against}",
            against_best(name, "PufferLib", LOCKSTEP),
        )
        yield (
            f"ParallelEnv against loops that meet, {step} steps, workers: {workers}",
            ratio(name, OURS_PARALLEL, LOCKSTEP, "rate"),
        )
        yield (
            f"CPU seconds of direct loops, of {against}",
            cpu_against_best(name, "PufferLib", DIRECT),
        )
