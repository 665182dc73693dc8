"""What stands beside the targets: ratios from or to limits, which no target is about.

Direct loops keep nothing, so a ratio to them holds what storing and reading cost
anybody; a ratio to direct loops that store holds only what the framework costs. How far
direct loops are ahead of a peer is as far as anybody could be who uses our adapters.
Those that meet at every step are what our ParallelEnv of one group could reach with a
trainer that takes no time; one of two groups meets less often. The same is said of what
is no race: a copy alone, processes that only wake, a loop that keeps its frames.
"""

from collections.abc import Callable, Iterator

from experiments import scaling
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

Ratio = Callable[[], Estimate]

_WAYS = (
    (OURS, BETWEEN, ", between resets"),
    (OURS_LARGE, "rate", ", large batches, with resets"),
)


def beside_targets(reading: Reading) -> Iterator[tuple[str, Estimate]]:
    """Yield what is compared, and the ratio, as far as it was measured."""
    for ratios in (_headline, _figures, _scaling, _puffers):
        for title, ratio in ratios(reading):
            try:
                yield title, ratio()
            except MissingError:
                continue


def _headline(reading: Reading) -> Iterator[tuple[str, Ratio]]:
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
                _between(reading, name, ours, STORED, field),
            )
        _, field, note = ways[0]
        for loops, other in (("direct", DIRECT), ("stock", STOCK)):
            yield (
                f"storing direct loops against {loops}: {workload}, {policy}{note}",
                _between(reading, name, STORED, other, field),
            )
        yield (
            f"direct loops against TorchRL's best: {workload}, {policy}",
            _ahead_of(reading, name, "torchrl"),
        )


def _figures(reading: Reading) -> Iterator[tuple[str, Ratio]]:
    yield (
        "framework cost of a frame in a worker, of a loop that stores",
        _of(reading, "figures/worker_cost", "ours", "framework_us", "storing_loop_us"),
    )
    for processes in ("2", "16"):
        yield (
            f"trainer's cost per worker-step, of processes that only wake: {processes}",
            _of(
                reading,
                "figures/parent_cost",
                processes,
                "parent_us",
                "wake_ups_alone_us",
            ),
        )
    yield (
        "publishing 76,000 parameters, of copying them alone",
        _of(reading, "figures/weights", "ours", "publish_us", "copy_alone_us"),
    )


def _scaling(reading: Reading) -> Iterator[tuple[str, Ratio]]:
    name = f"scaling/lognormal/{scaling.MOST}"
    yield (
        f"{scaling.MOST} sleeping workers, lognormal: MultiAsync of processes alone",
        _between(reading, name, scaling.OURS_ASYNC, scaling.FREE_SLEEPERS, "rate"),
    )


def _puffers(reading: Reading) -> Iterator[tuple[str, Ratio]]:
    for name in reading.names("puffer/"):
        _, step, workers = name.split("/")
        against = f"PufferLib's best, {step} steps, workers: {workers}"
        yield f"direct loops against {against}", _ahead_of(reading, name, "PufferLib")
        yield (
            f"direct loops that meet at every step against {against}",
            _ahead_of(reading, name, "PufferLib", LOCKSTEP),
        )
        yield (
            f"ParallelEnv against loops that meet, {step} steps, workers: {workers}",
            _between(reading, name, OURS_PARALLEL, LOCKSTEP, "rate"),
        )
        yield (
            f"CPU seconds of direct loops, of {against}",
            _cpu_of(reading, name, "PufferLib"),
        )


def _between(
    reading: Reading, experiment: str, ours: str, other: str, field: str
) -> Ratio:
    return lambda: reading.ratio(experiment, ours, other, field)


def _ahead_of(
    reading: Reading, experiment: str, peer: str, loops: str = DIRECT
) -> Ratio:
    def ratio() -> Estimate:
        best = reading.fastest(experiment, peer)
        return reading.ratio(experiment, loops, best)

    return ratio


def _of(reading: Reading, experiment: str, label: str, field: str, limit: str) -> Ratio:
    def ratio() -> Estimate:
        figures = reading.values(experiment, label, field)
        limits = reading.values(experiment, label, limit)
        return Estimate.of_ratios(figures, limits)

    return ratio


def _cpu_of(reading: Reading, experiment: str, peer: str) -> Ratio:
    def ratio() -> Estimate:
        best = reading.fastest(experiment, peer)
        return reading.cpu_ratio(experiment, DIRECT, best)

    return ratio
