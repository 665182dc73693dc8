"""The other peers, stepping with random actions, the same frames stored and read."""

from dataclasses import replace
from typing import Any

from harness.served import System

from experiments.experiment import Experiment
from experiments.headline import (
    OURS_PARALLEL,
    PARALLEL_KIND,
    TORCHRL_PARALLEL,
    ours,
    torchrl_system,
)
from experiments.settings import Settings

PEERS = {
    "Gymnasium AsyncVectorEnv": ("peers.gymnasium_async", ""),
    "SuperSuit": ("peers.supersuit_concat", "supersuit"),
    "AgileRL": ("peers.agilerl_async", "agilerl"),
    "RLlib": ("peers.rllib_runner", "rllib"),
}
WORKLOADS = ("multiwalker", "free")


def experiments(settings: Settings) -> list[Experiment]:
    """Return them, with the peers that are installed."""
    if settings.quick:
        return []
    workloads = WORKLOADS if settings.whole else WORKLOADS[:1]
    return [_row(settings, workload) for workload in workloads]


def _row(settings: Settings, workload: str) -> Experiment:
    base = System("", workload, "random", settings.workers)
    systems = {
        OURS_PARALLEL: ours(base, kind="parallel"),
        TORCHRL_PARALLEL: torchrl_system(base, PARALLEL_KIND),
    }
    grids: dict[str, dict[str, System]] = {}
    for label, (runner, name) in PEERS.items():
        if name and name not in settings.pythons:
            continue
        python = str(settings.pythons[name]) if name else ""
        peer = replace(base, runner=runner, python=python)
        grids[label] = {
            f"{count} environments": _with(peer, environments=count)
            for count in (settings.workers, 4 * settings.workers)
        }
    return Experiment(
        f"peers/{workload}",
        f"{workload}, random actions: who steps environments in processes",
        systems,
        settings.rounds,
        60.0,
        candidates=grids,
    )


def _with(system: System, **options: Any) -> System:
    return replace(system, options=system.options | options)
