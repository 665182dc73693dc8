"""The rows that targets are about: ours, TorchRL at its best, and the limits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.served import System
from harness.windows import BETWEEN
from peers.torchrl_collectors import CANDIDATES

from experiments.experiment import Experiment
from experiments.settings import Settings

OURS, OURS_PARALLEL = "ours", "ours, ParallelEnv"
OURS_LARGE = "ours, large batches"
TORCHRL, TORCHRL_PARALLEL = "torchrl, best", "torchrl, ParallelEnv"
STOCK, DIRECT = "stock loops", "direct loops"
STORED = "direct loops that store"
PARALLEL_KIND = "ParallelEnv"
_SOME_CANDIDATES = ("sync, stack", "async", PARALLEL_KIND)
LARGE = 4000
"""Frames of a large batch."""
_LARGE_OF_IMAGES = 1000  # Frames of a worker.
STORING = ("commons_harvest", "multiwalker", "simple_spread")
"""Workloads of which it is shown what storing costs without a framework."""
_LEAST_WINDOW = {"commons_harvest": 4.0}  # A reset takes a second.


def experiments(settings: Settings) -> list[Experiment]:
    """Return them, most important first."""
    return [
        _row(settings, "multiwalker", "mlp", parallel=True),
        _row(settings, "simple_spread", "mlp"),
        _row(settings, "free", "mlp", parallel=True),
        _row(settings, "commons_harvest", "random", start_seconds=45.0),
        _row(settings, "multiwalker", "random", torchrl=False),
        _row(settings, "simple_spread", "random", torchrl=False),
    ]


def _row(
    settings: Settings,
    workload: str,
    policy: str,
    *,
    torchrl: bool = True,
    parallel: bool = False,
    start_seconds: float = 20.0,
) -> Experiment:
    workers = settings.workers
    base = System("", workload, policy, workers)
    frames = 200 if workload == "commons_harvest" else 1000
    parallel = parallel and not (settings.quick and workload != "free")
    our_system = ours(base, kind="sync", frames_per_batch=frames)
    systems = {
        STOCK: replace(base, runner="limits.stock", copies=workers),
        DIRECT: replace(base, runner="limits.direct", copies=workers),
    }
    grid: dict[str, dict[str, System]] = {}
    if not settings.quick and workload in STORING:
        storing_options = {"frames": frames // workers}
        systems[STORED] = replace(
            base, runner="limits.stored", copies=workers, options=storing_options
        )
    if settings.quick:
        systems = {OURS: our_system} | systems
    else:
        sizes = (frames, 3 * frames if workload == "commons_harvest" else LARGE)
        grid[OURS] = collecting(our_system, sizes)
    if parallel and settings.quick:
        systems[OURS_PARALLEL] = ours(base, kind="parallel")
        systems[TORCHRL_PARALLEL] = torchrl_system(base, PARALLEL_KIND)
    elif parallel:
        grid |= _parallel_grid(base)
    if torchrl and settings.quick:
        systems[TORCHRL] = torchrl_system(base, _SOME_CANDIDATES[0])
    names = list(CANDIDATES) if settings.whole else list(_SOME_CANDIDATES)
    names = [name for name in names if name != PARALLEL_KIND or not parallel]
    if torchrl and not settings.quick:
        grid[TORCHRL] = {name: torchrl_system(base, name) for name in names}
        if workload != "commons_harvest":
            large = {"frames_per_batch": LARGE}
            system = with_options(torchrl_system(base, "sync, cat"), **large)
            grid[TORCHRL]["sync, cat, large batches"] = system
    if workload == "commons_harvest" and not settings.quick:
        # A reset of one worker holds up the others, once per batch. The small batches
        # above are for what is measured between resets.
        large = {"frames_per_batch": _LARGE_OF_IMAGES * workers}
        grid[OURS_LARGE] = {
            "waiting": with_options(our_system, **large),
            "prefetch": with_options(our_system, prefetch=True, **large),
        }
        for kind, per in (("async", 1), ("sync, cat", workers)):
            grid[TORCHRL][f"{kind}, large batches"] = with_options(
                torchrl_system(base, kind), frames_per_batch=_LARGE_OF_IMAGES * per
            )
        grid[TORCHRL].pop("async, small batches", None)  # Here all are small.
    return Experiment(
        f"headline/{workload}/{policy}",
        f"{workload}, {policy} policy, {workers} workers",
        systems,
        settings.headline_rounds,
        start_seconds + (10.0 if parallel else 0.0),
        candidates=grid,
        fastest_by={OURS: BETWEEN} if workload == "commons_harvest" else {},
        least_window=0.0 if settings.quick else _LEAST_WINDOW.get(workload, 2.0),
    )


def collecting(
    system: System, sizes: Sequence[int] = (1000, LARGE)
) -> dict[str, System]:
    """Return the ways in which our collector is tried, with batches of these frames."""
    # Larger batches cost less, and who is faster waits less often for the others. All
    # that is learnt here is to read: while the next batch is collected?
    return {
        f"{mode}, {size} frames": with_options(system, frames_per_batch=size, **options)
        for size in sizes
        for mode, options in (("waiting", {}), ("prefetch", {"prefetch": True}))
    }


def _parallel_grid(base: System) -> dict[str, dict[str, System]]:
    """Return both ParallelEnvs with as many environments as workers, and with more."""
    counts = (base.workers, 4 * base.workers)
    theirs = torchrl_system(base, PARALLEL_KIND)
    system = ours(base, kind="parallel")
    return {
        TORCHRL_PARALLEL: {
            f"{n} environments, processes: {p}, {frames} frames": with_options(
                theirs, environments=n, processes=p, frames_per_batch=frames
            )
            for n, p, frames in (
                (base.workers, base.workers, 200),
                (base.workers, base.workers, 1000),
                (counts[-1], base.workers, 1000),
                (counts[-1], counts[-1], 1000),
            )
        },
        OURS_PARALLEL: {
            f"{n} environments, processes: {p}, groups: {g}": with_options(
                system, environments=n, processes=p, groups=g
            )
            for n in counts
            for p, g in ((1, 1), (base.workers, 1), (base.workers, 2))
        },
    }


def with_options(system: System, **options: Any) -> System:
    """Return a system with further options."""
    # With prefetch it goes on by itself: what it collects between two windows, while
    # others are measured, would be a gift.
    pause = system.pause or bool(options.get("prefetch"))
    return replace(system, options=system.options | options, pause=pause)


def ours(base: System, *, kind: str, frames_per_batch: int = 1000) -> System:
    """Return our collector of a kind."""
    options = {"kind": kind, "frames_per_batch": frames_per_batch}
    return replace(base, runner="ours.collectors", options=base.options | options)


def torchrl_system(base: System, candidate: str) -> System:
    """Return TorchRL's collector in one of its configurations."""
    options = CANDIDATES[candidate]
    if base.workload == "commons_harvest":
        options = {**options, "frames_per_batch": 200}
    return replace(
        base,
        runner="peers.torchrl_collectors",
        options=base.options | options,
        pause=options["kind"] == "async",
    )
