"""Further workloads and policies: ours, TorchRL in one configuration, the limits."""

from dataclasses import replace

from harness.served import System

from experiments.experiment import Experiment
from experiments.headline import DIRECT, OURS, STOCK, TORCHRL, ours, torchrl_system
from experiments.settings import Settings

OURS_ASYNC = "ours, async"
_ROWS = (
    ("multiwalker", "unshared"),
    ("simple_spread", "unshared"),
    ("simple_tag", "mlp"),
    ("free_8x256", "mlp"),
    ("free_7x5808", "random"),
    ("coins", "random"),
    ("commons_harvest", "cnn"),
    ("burning", "mlp"),
    ("free", "random"),
)
BURNING_MICROSECONDS = 1000
_CONFIGURATION = "sync, stack"


def experiments(settings: Settings) -> list[Experiment]:
    """Return them."""
    if settings.quick:
        return []
    return [_row(settings, workload, policy) for workload, policy in _ROWS]


def _row(settings: Settings, workload: str, policy: str) -> Experiment:
    workers = settings.workers
    base = System("", workload, policy, workers)
    if workload == "burning":
        spins = round(settings.spins_per_us * BURNING_MICROSECONDS)
        base = replace(base, options={"environment": {"spins": spins}})
    pictures = workload in ("coins", "commons_harvest")
    frames = 200 if pictures else 1000
    systems = {
        OURS: ours(base, kind="sync", frames_per_batch=frames),
        OURS_ASYNC: ours(base, kind="async", frames_per_batch=frames),
        TORCHRL: torchrl_system(base, _CONFIGURATION),
    }
    if policy != "unshared":  # the limits know networks that are shared
        systems[STOCK] = replace(base, runner="limits.stock", copies=workers)
        systems[DIRECT] = replace(base, runner="limits.direct", copies=workers)
    return Experiment(
        f"grid/{workload}/{policy}",
        f"{workload}, {policy} policy, {workers} workers",
        systems,
        settings.rounds,
        40.0 if pictures else 22.0,
    )
