"""PufferLib on workloads with identical code: within the cores, and beyond."""

from dataclasses import replace
from typing import Any

from harness.served import System

from experiments.experiment import Experiment
from experiments.headline import DIRECT, LARGE, OURS, OURS_PARALLEL, collecting
from experiments.settings import Settings

SYNC, POOL, GATHER, ONE = (
    "PufferLib, sync",
    "PufferLib, pool",
    "PufferLib, pool, no zero copy",
    "PufferLib, pool of one worker",
)
INFOS = "PufferLib, sync, empty infos not stripped"
LOCKSTEP = "direct loops that meet at every step"
"""As those of a ParallelEnv do, waiting as they do, for a trainer that does nothing."""
ENVIRONMENTS = 4
WORKERS = (1, 2, 4)
MICROSECONDS = (0, 100)


def experiments(settings: Settings) -> list[Experiment]:
    """Return them: none if PufferLib is not installed."""
    if "pufferlib" not in settings.pythons:
        return []
    return [_point(settings, workers, us) for us in MICROSECONDS for workers in WORKERS]


def _point(settings: Settings, workers: int, microseconds: int) -> Experiment:
    spins = round(settings.spins_per_us * microseconds)
    env_options = {"spins": spins, "empty_infos": False}
    base = System("", "burning", "random", workers)
    puffer = replace(
        base,
        runner="peers.pufferlib_vector",
        python=str(settings.pythons["pufferlib"]),
        pause=True,
    )

    def theirs(environment: dict[str, Any], **options: Any) -> System:
        merged = {"environment": environment, "environments": ENVIRONMENTS} | options
        return replace(puffer, options=merged)

    common = {"environment": env_options, "environments": ENVIRONMENTS}
    parallel_options = {"kind": "parallel", "processes": workers} | common
    parallel = {
        f"groups: {groups}": replace(
            base,
            runner="ours.collectors",
            options=parallel_options | {"groups": groups},
        )
        for groups in (1, 2)
    }
    sync = replace(base, runner="ours.collectors", options={"kind": "sync"} | common)
    systems = {
        DIRECT: replace(
            base,
            runner="limits.direct",
            copies=workers,
            options={"environment": env_options},
        ),
        LOCKSTEP: replace(base, runner="limits.lockstep", options=common),
        SYNC: theirs(env_options),
        INFOS: theirs({"spins": spins, "empty_infos": True}),
    }
    if settings.quick:
        systems = {OURS_PARALLEL: parallel["groups: 1"], OURS: sync} | systems
    if workers > 1 and not settings.quick:
        half = {"batch_size": ENVIRONMENTS // 2}
        systems[POOL] = theirs(env_options, **half)
        if workers > 2:  # Else half of the environments are one worker's.
            systems[GATHER] = theirs(env_options, zero_copy=False, **half)
            batch_of_one = {"batch_size": ENVIRONMENTS // workers}
            systems[ONE] = theirs(env_options, **batch_of_one)
    grid = {OURS_PARALLEL: parallel, OURS: collecting(sync, (LARGE,))}
    within = workers <= settings.workers and not settings.quick
    return Experiment(
        f"puffer/{microseconds}us/{workers}",
        f"{ENVIRONMENTS} environments of {microseconds} us in {workers} workers",
        systems,
        settings.headline_rounds if within else settings.rounds,
        12.0,
        candidates={} if settings.quick else grid,
        notes={"workers": workers, "microseconds": microseconds},
    )
