"""1 to 64 sleeping workers, against the same processes without a framework."""

from dataclasses import replace

from harness.served import System
from limits.sleepers import STEPS
from workloads.sleeping import MILLISECONDS

from experiments.experiment import Experiment
from experiments.settings import Settings

OURS_ASYNC, OURS_SYNC = "ours, async", "ours, sync"
FREE_SLEEPERS, BARRIER = "processes", "processes, barrier"
MOST = 64
_LOGNORMAL = (1, 2, 4, 8, 16, 32, MOST)
_CONSTANT = (1, 4, 16, MOST)
_SOME = [(16, 1.0), (4, 1.0), (MOST, 0.0), (4, 0.0)]
_WINDOW = 3.0


def headline(settings: Settings) -> list[Experiment]:
    """Return the point that targets are about."""
    return [_point(MOST, 1.0, 2 if settings.quick else 5)]


def experiments(settings: Settings) -> list[Experiment]:
    """Return the other points of the curves."""
    if settings.quick:
        return []
    all_points = [(count, 1.0) for count in _LOGNORMAL] + [(n, 0.0) for n in _CONSTANT]
    points = all_points if settings.whole else _SOME
    return [_point(n, cv, 2) for n, cv in points if (n, cv) != (MOST, 1.0)]


def _point(count: int, cv: float, rounds: int) -> Experiment:
    base = System("", "sleeping", "random", count)
    bare = replace(base, runner="limits.sleepers")
    common = {"each": True, "environment": {"cv": cv}}
    collecting = replace(base, runner="ours.collectors")
    sync = common | {"kind": "sync", "frames_per_batch": count * STEPS}
    asynchronous = common | {"kind": "async", "frames_per_batch": STEPS}
    return Experiment(
        f"scaling/{'lognormal' if cv else 'constant'}/{count}",
        f"{count} workers that sleep {MILLISECONDS:g} ms a step, CV {cv:g}",
        {
            OURS_ASYNC: replace(collecting, options=asynchronous, pause=True),
            OURS_SYNC: replace(collecting, options=sync),
            FREE_SLEEPERS: replace(
                bare, options={"cv": cv, "barrier": False}, pause=True
            ),
            BARRIER: replace(bare, options={"cv": cv, "barrier": True}),
        },
        rounds,
        10.0 + count / 8,
        least_window=_WINDOW,
        notes={"workers": count, "cv": cv, "ideal": count / (MILLISECONDS / 1000)},
    )
