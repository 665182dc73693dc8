"""All experiments, in order: what is first is measured even if time runs out."""

from experiments import figures, grid, headline, puffer, scaling
from experiments.experiment import Experiment
from experiments.settings import Settings


def plan(settings: Settings) -> list[Experiment]:
    """Return what a run measures."""
    everything = [
        *headline.experiments(settings),
        *figures.experiments(settings),
        *scaling.headline(settings),
        *puffer.experiments(settings),
        *scaling.experiments(settings),
        *grid.experiments(settings),
    ]
    if not settings.only:
        return everything
    return [
        experiment
        for experiment in everything
        if experiment.name.startswith(settings.only)
    ]
