"""Runs all experiments that the targets, the README's table and its chart need.

    python benchmarks/suite.py --minutes 90         # the committed run
    python benchmarks/suite.py --quick              # five minutes
    python benchmarks/suite.py --resume             # continue an interrupted run

Results are written to the JSON file after each experiment. docs/benchmarks.md explains
the protocol. If an experiment or a system
fails or hangs, this is recorded and the suite continues.
"""

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment
from experiments.plan import plan
from experiments.settings import Settings
from harness.budget import Budget
from harness.control import control, disturbed
from harness.machine import machine, pressure
from harness.results import Results
from peers.installed import installed, pythons
from rich.console import Console
from workloads.burning import spins_per_microsecond

QUICK_MINUTES = 5.0
console = Console(stderr=True, highlight=False)


def run(settings: Settings, results: Results) -> None:
    """Run the experiments that have no results yet, while there is time."""
    budget = Budget(settings.minutes)
    ahead = [planned for planned in plan(settings) if not results.done(planned.name)]
    total = len(ahead)
    while ahead:
        experiment = ahead[0]
        costs = [planned.cost for planned in ahead]
        if budget.left() < experiment.cost.fixed / 2:
            reason = {"status": "not run", "reason": "no time was left"}
            results.add(experiment.name, {"title": experiment.title, **reason})
            console.print(f"{experiment.name}: no time left")
        else:
            window = budget.window(costs)
            seconds = [cost.seconds(window) for cost in costs]
            minutes = min(budget.left(), sum(seconds)) / 60
            console.print(
                f"[dim]{total - len(ahead) + 1} of {total}, {seconds[0] / 60:.1f} of "
                f"{minutes:.1f} min left, windows of {window:.1f} s:[/] "
                f"{experiment.title}"
            )
            results.add(experiment.name, measure(experiment, window))
        ahead.pop(0)


def measure(experiment: Experiment, window: float) -> dict[str, Any]:
    """Run an experiment and return its results, or its failure."""
    begin, before = time.time(), control()
    record: dict[str, Any] = {"title": experiment.title, "status": "ok", "reason": ""}
    try:
        record |= experiment.run(window, console.print)
    except Exception:  # noqa: BLE001 - recorded; the suite continues
        record |= {"status": "failed", "reason": traceback.format_exc()}
        console.print(record["reason"])
    after = control()
    return record | {
        "wall_seconds": time.time() - begin,
        "control": [before, after],
        "disturbed": disturbed(before, after),
        "cpu_pressure": pressure(),
    }


def main() -> None:
    """Run the experiments and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=35.0, help="total time")
    parser.add_argument("--quick", action="store_true", help="run for five minutes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep existing results")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks.json"))
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="run experiments whose names begin with this, such as headline",
    )
    parser.add_argument("--list", action="store_true", help="list names and costs")
    arguments = parser.parse_args()
    settings = Settings(
        minutes=QUICK_MINUTES if arguments.quick else arguments.minutes,
        workers=arguments.workers,
        pythons=pythons(arguments.peers),
        spins_per_us=spins_per_microsecond(),
        only=tuple(arguments.only),
    )
    experiments = plan(settings)
    if not experiments:
        names = " or ".join(arguments.only)
        parser.error(f"No experiment begins with {names}: see --list.")
    if arguments.list:
        for experiment in experiments:
            cost = experiment.cost
            print(
                f"{experiment.name:40} {cost.fixed:6.0f} s + {cost.windows:4} windows "
                f"of at least {cost.least:g} s"
            )
        return
    results = Results(arguments.json, resume=arguments.resume)
    begin = time.time()
    runs = results.data.get("runs", [])
    run_record = {
        "machine": machine(),
        "minutes": settings.minutes,
        "only": list(settings.only),
        "resumed": arguments.resume,
        "workers": settings.workers,
        "spins_per_us": settings.spins_per_us,
        "peers": installed(arguments.peers),
    }
    results.note("runs", [*runs, run_record])
    try:
        run(settings, results)
    finally:
        run_record["wall_seconds"] = time.time() - begin
        results.note("runs", [*runs, run_record])
        console.print(f"Results are in {results.path}.")
    console.print("Targets: python benchmarks/check_targets.py", str(results.path))


if __name__ == "__main__":
    main()
