"""What was aimed at, and whether it was reached."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from experiments.headline import (
    DIRECT,
    OURS,
    OURS_LARGE,
    OURS_PARALLEL,
    STOCK,
    TORCHRL_PARALLEL,
)
from experiments.puffer import MICROSECONDS, WORKERS
from harness.estimates import Estimate
from harness.windows import BETWEEN

from reporting.reading import MissingError, Reading

Figure = Callable[[Reading], Estimate]


@final
@dataclass(frozen=True)
class Target:
    """A figure and the bound that it shall keep.

    Attributes:
        title: what it is.
        bound: the number.
        figure: finds it in a run.
        at_least: whether the figure shall be at least that; else at most.
    """

    title: str
    bound: float
    figure: Figure
    at_least: bool = True

    @property
    def aim(self) -> str:
        """Return the bound as people read it."""
        return f"{'>=' if self.at_least else '<='} {self.bound:g} x"


@final
@dataclass(frozen=True)
class Verdict:
    """A target, and what a run says about it.

    Attributes:
        target: what was aimed at.
        figure: None if it was not measured.
        reason: why it was not.
    """

    target: Target
    figure: Estimate | None
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the median keeps the bound."""
        return self.figure is not None and self._keeps(self.figure.median)

    @property
    def certain(self) -> bool:
        """Whether the whole interval lies on the median's side of the bound."""
        if self.figure is None:
            return False
        ends = (self.figure.low, self.figure.high)
        return all(self._keeps(end) == self.passed for end in ends)

    @property
    def word(self) -> str:
        """Return pass, fail, or that it was not measured."""
        if self.figure is None:
            return "not measured"
        return "pass" if self.passed else "fail"

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Title, aim, figure or reason, word, and whether the interval is clear."""
        figure = self.reason if self.figure is None else str(self.figure)
        sure = "" if self.figure is None else "sure" if self.certain else "open"
        return self.target.title, self.target.aim, figure, self.word, sure

    def _keeps(self, value: float) -> bool:
        bound = self.target.bound
        return value >= bound if self.target.at_least else value <= bound


def judge(reading: Reading) -> list[Verdict]:
    """Return what a run says about every target."""
    verdicts = []
    for target in TARGETS:
        try:
            verdicts.append(Verdict(target, target.figure(reading)))
        except MissingError as error:
            verdicts.append(Verdict(target, None, str(error)))
    return verdicts


def ratio(experiment: str, ours: str, other: str, field: str = "rate") -> Figure:
    """Return the ratio of a field of two systems."""
    return lambda reading: reading.ratio(experiment, ours, other, field)


def against_best(experiment: str, prefix: str, ours: str) -> Figure:
    """Return the ratio of rates to the fastest system whose label begins so."""
    return lambda reading: reading.ratio(
        experiment, ours, reading.fastest(experiment, prefix)
    )


def cpu_against_best(experiment: str, prefix: str, ours: str) -> Figure:
    """Return the ratio of processor time per frame to that of the fastest system."""
    return lambda reading: reading.cpu_ratio(
        experiment, ours, reading.fastest(experiment, prefix)
    )


def _headline() -> list[Target]:
    walker, spread, free = "multiwalker", "simple_spread", "free"
    harvest = "commons_harvest"
    beside_torchrl = "MultiSync against TorchRL's best"
    beside_stock = "MultiSync, random, against stock loops"
    beside_direct = "MultiSync against direct loops"
    return [
        *(
            Target(
                f"{beside_torchrl}: {name}, MLP",
                bound,
                against_best(f"headline/{name}/mlp", "torchrl", OURS),
            )
            for name, bound in ((walker, 3.0), (spread, 8.0), (free, 40.0))
        ),
        Target(
            f"{beside_torchrl}: {harvest}, random, with resets",
            4.0,
            against_best(f"headline/{harvest}/random", "torchrl", OURS_LARGE),
        ),
        *(
            Target(
                f"{beside_stock}: {name}",
                bound,
                ratio(f"headline/{name}/random", OURS, STOCK),
            )
            for name, bound in ((walker, 1.2), (spread, 1.6))
        ),
        Target(
            f"{beside_stock}: {harvest}, between resets",
            1.35,
            ratio(f"headline/{harvest}/random", OURS, STOCK, BETWEEN),
        ),
        *(
            Target(
                f"{beside_direct}: {name}, random",
                0.95,
                ratio(f"headline/{name}/random", OURS, DIRECT),
            )
            for name in (walker, spread)
        ),
        Target(
            f"{beside_direct}: {harvest}, random, between resets",
            0.95,
            ratio(f"headline/{harvest}/random", OURS, DIRECT, BETWEEN),
        ),
        *(
            Target(
                f"{beside_direct}: {name}, MLP",
                0.92,
                ratio(f"headline/{name}/mlp", OURS, DIRECT),
            )
            for name in (walker, spread)
        ),
        *(
            Target(
                f"ParallelEnv against TorchRL's: {name}, MLP",
                bound,
                ratio(f"headline/{name}/mlp", OURS_PARALLEL, TORCHRL_PARALLEL),
            )
            for name, bound in ((free, 20.0), (walker, 4.0))
        ),
    ]


def _puffers() -> list[Target]:
    """Return those of the vector environment, then those of the collector."""
    targets = []
    for name, ours in (
        ("ParallelEnv", OURS_PARALLEL),
        ("MultiSync (its workers act)", OURS),
    ):
        for microseconds in MICROSECONDS:
            for workers in WORKERS:
                experiment = f"puffer/{microseconds}us/{workers}"
                subject = (
                    f"PufferLib's best, {microseconds} us steps, workers: {workers}"
                )
                bound = 1.0 if workers == 1 else 3.0
                rate = against_best(experiment, "PufferLib", ours)
                cpu = cpu_against_best(experiment, "PufferLib", ours)
                targets += [
                    Target(f"{name} against {subject}", bound, rate),
                    Target(
                        f"CPU seconds per frame of {name}, of {subject}",
                        1.0,
                        cpu,
                        at_least=False,
                    ),
                ]
    return targets


TARGETS = [*_headline(), *_puffers()]
"""All of them; those about PufferLib take one worker as within two cores."""
