"""PufferLib on workloads with identical code: within the cores, and beyond."""

from dataclasses import replace
from typing import Any

from harness.served import System

from experiments.experiment import Experiment
from experiments.headline import DIRECT, OURS_PARALLEL
from experiments.settings import Settings

SYNC, POOL, GATHER = (
    "PufferLib, sync",
    "PufferLib, pool",
    "PufferLib, pool, no zero copy",
)
INFOS = "PufferLib, sync, empty infos not stripped"
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
    stripped = {"spins": spins, "empty_infos": False}
    base = System("", "burning", "random", workers)
    puffer = replace(
        base,
        runner="peers.pufferlib_vector",
        python=str(settings.pythons["pufferlib"]),
        pause=True,
    )

    def theirs(environment: dict[str, Any], **options: Any) -> System:
        given = {"environment": environment, "environments": ENVIRONMENTS} | options
        return replace(puffer, options=given)

    given = {"kind": "parallel", "environments": ENVIRONMENTS, "processes": workers}
    ours = {
        f"groups: {groups}": replace(
            base,
            runner="ours.collectors",
            options=given | {"environment": stripped, "groups": groups},
        )
        for groups in (1, 2)
    }
    systems = {
        DIRECT: replace(
            base,
            runner="limits.direct",
            copies=workers,
            options={"environment": stripped},
        ),
        SYNC: theirs(stripped),
        INFOS: theirs({"spins": spins, "empty_infos": True}),
    }
    if settings.quick:
        systems = {OURS_PARALLEL: ours["groups: 1"]} | systems
    if workers > 1 and not settings.quick:
        half = {"batch_size": ENVIRONMENTS // 2}
        systems[POOL] = theirs(stripped, **half)
        systems[GATHER] = theirs(stripped, zero_copy=False, **half)
    within = workers <= settings.workers and not settings.quick
    return Experiment(
        f"puffer/{microseconds}us/{workers}",
        f"{ENVIRONMENTS} environments of {microseconds} us in {workers} workers",
        systems,
        settings.headline_rounds if within else settings.rounds,
        12.0,
        candidates={} if settings.quick else {OURS_PARALLEL: ours},
        notes={"workers": workers, "microseconds": microseconds},
    )
