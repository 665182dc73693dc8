"""All experiments, in order: what is first is measured even if time runs out."""

from experiments import headline, puffer
from experiments.experiment import Experiment
from experiments.settings import Settings


def plan(settings: Settings) -> list[Experiment]:
    """Return what a run measures."""
    everything = [
        *headline.experiments(settings),
        *puffer.experiments(settings),
    ]
    if not settings.only:
        return everything
    return [
        experiment
        for experiment in everything
        if experiment.name.startswith(settings.only)
    ]
