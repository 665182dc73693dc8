"""Made-up benchmark results for tests."""

from pathlib import Path
from typing import Any

from experiments.plan import plan
from experiments.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PYTHONS = {"pufferlib": Path("python")}
EVERYTHING = Settings(minutes=90, pythons=PYTHONS)


def window(value: float) -> dict[str, Any]:
    """Return a window in which every measurement is `value`."""
    return {
        "frames": 1000,
        "seconds": 1.0,
        "cpu_seconds": value,
        "own_cpu": 0.1,
        "episodes": 3,
        "rate": value,
        "rate_between": value,
    }


def made_up(values: dict[str, float], settings: Settings = EVERYTHING) -> Any:
    """Return results of the whole plan, with `values` by label, or 1."""
    experiments = {}
    for experiment in plan(settings):
        labels = {**experiment.systems, **dict.fromkeys(experiment.candidates)}
        grids = {
            label: {
                "rates": dict.fromkeys(candidates, 1.0),
                "errors": {},
                "best": next(iter(candidates)),
            }
            for label, candidates in experiment.candidates.items()
        }
        systems = {}
        for label in labels:
            system = experiment.systems.get(label)
            if system is None:
                system = next(iter(experiment.candidates[label].values()))
            value = values.get(label, 1.0)
            systems[label] = {
                "system": system.plain(),
                "windows": [window(value), window(value * 1.01)],
                "ready_seconds": 2.0,
                "memory_mb": 100.0,
                "error": "",
            }
        experiments[experiment.name] = {
            "title": experiment.title,
            "status": "ok",
            "reason": "",
            "window": 5.0,
            "rounds": 2,
            "grids": grids,
            "systems": systems,
            "notes": dict(experiment.notes),
            "control": [1.0, 1.01],
            "disturbed": False,
        }
    run = {
        "machine": {
            "cpu": "a <fast> CPU",
            "cores": 2,
            "date": "2026-01-01T00:00:00",
            "versions": {"torchrl": "0.14.1", "torch": "2.13.0"},
        },
        "minutes": 90.0,
        "only": [],
        "resumed": False,
        "wall_seconds": 60.0,
        "workers": 2,
        "peers": {
            "pufferlib": {"status": "failed", "reason": "no disk", "versions": {}}
        },
    }
    return {"format": 1, "runs": [run], "experiments": experiments}
