"""Small figures about ours."""

from harness.served import System

from experiments.experiment import Experiment
from experiments.settings import Settings

PROCESSES = (1, 2, 4, 8, 16)
MORE_WORKERS = 16


def experiments(settings: Settings) -> list[Experiment]:
    """Return them."""
    rounds = 3 if settings.quick else 5
    least_seconds = 0.0 if settings.quick else 2.0
    parents = {
        str(count): System("figures.parent_cost", "free", workers=count)
        for count in PROCESSES
    }
    preloaded = {"preload": ["pettingzoo.sisl.multiwalker_v9"]}
    more_workers = MORE_WORKERS
    return [
        Experiment(
            "figures/worker_cost",
            "what a frame costs a worker beside the environment",
            {"ours": System("figures.worker_cost", "free")},
            rounds,
            6.0,
            least_window=least_seconds,
        ),
        Experiment(
            "figures/parent_cost",
            "what a step of ParallelEnv costs the trainer, by processes",
            parents,
            rounds,
            12.0,
            least_window=least_seconds,
        ),
        Experiment(
            "figures/weights",
            "an update of 76,040 parameters",
            {"ours": System("figures.weights", "free", workers=settings.workers)},
            rounds,
            8.0,
            least_window=least_seconds,
        ),
        Experiment(
            "figures/startup",
            f"{more_workers} more workers of a program that has some",
            {
                "free": System("figures.startup", "free", "mlp", more_workers),
                "multiwalker": System(
                    "figures.startup",
                    "multiwalker",
                    "mlp",
                    more_workers,
                    options=preloaded,
                ),
            },
            1 if settings.quick else rounds,
            20.0 + (8.0 if settings.quick else 8.0 * rounds),
        ),
        Experiment(
            "figures/prefetch",
            "one worker and a one-thread learner, multiwalker",
            {"ours": System("figures.prefetch", "multiwalker", "mlp", 1)},
            rounds,
            10.0,
            least_window=2.0 if settings.quick else 4.0,
        ),
        Experiment(
            "figures/cold_start",
            "from the start of the interpreter to the third batch, free, MLP",
            {"ours": System("ours.collectors", "free", "mlp", settings.workers)},
            1,
            5.0,
        ),
        Experiment(
            "figures/failure",
            "kill -9 of a worker, and shutdown",
            {"ours": System("figures.failure", "free", workers=settings.workers)},
            rounds,
            8.0,
        ),
    ]
