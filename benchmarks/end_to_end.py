"""BenchMARL experiments end to end: frames/s with its own collector and with ours.

    make build/versions/oldest/.made
    PYTHONPATH=build/versions/oldest python benchmarks/end_to_end.py --task MULTIWALKER

Settings, seeds, evaluation and training are equal; only ``Experiment`` is imported from
another place. Each experiment runs in a process of its own, one at a time, in turn. The
first iteration, which starts workers and fills caches, is not counted. The prerequisite
is BenchMARL, which needs torchrl below 0.12. ``peers/mpe_tasks`` lets TorchRL find the
tasks of MPE, such as SIMPLE_SPREAD, in ``mpe2``.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ITERATIONS = 5
MPE_TASKS = Path(__file__).parent / "peers" / "mpe_tasks"


def run(arguments: argparse.Namespace) -> None:
    """Run one experiment; print frames per second as the last line."""
    import benchmarl.algorithms
    from benchmarl.environments import PettingZooTask
    from benchmarl.experiment import ExperimentConfig
    from benchmarl.models import MlpConfig

    ours, theirs = "marl_collect.interop.benchmarl", "benchmarl.experiment"
    module = importlib.import_module(ours if arguments.whose == "ours" else theirs)

    config = ExperimentConfig.get_from_yaml()
    frames = arguments.frames
    settings = {
        "loggers": [],
        "create_json": False,
        "render": False,
        "evaluation": False,
        "max_n_frames": frames * ITERATIONS,
        "on_policy_collected_frames_per_batch": frames,
        "off_policy_collected_frames_per_batch": frames,
        "on_policy_n_envs_per_worker": arguments.environments,
        "off_policy_n_envs_per_worker": arguments.environments,
        "on_policy_n_minibatch_iters": arguments.epochs,
        "off_policy_n_optimizer_steps": arguments.epochs,
        "parallel_collection": arguments.whose == "parallel",
    }
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, value in (settings | {"save_folder": folder}).items():
            setattr(config, name, value)
        algorithm = getattr(benchmarl.algorithms, f"{arguments.algorithm}Config")
        experiment = module.Experiment(
            task=getattr(PettingZooTask, arguments.task).get_from_yaml(),
            algorithm_config=algorithm.get_from_yaml(),
            model_config=MlpConfig.get_from_yaml(),
            seed=0,
            config=config,
        )
        # Callbacks are pickled with the experiment; this is called once a batch.
        experiment._on_batch_collected = lambda _: times.append(time.perf_counter())  # noqa: SLF001
        experiment.run()
    seconds = times[-1] - times[0]
    rate = frames * (len(times) - 1) / seconds
    sys.stdout.write("\n" + json.dumps({"frames_per_second": rate}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run each system in turn, and print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="MULTIWALKER", help="of PettingZooTask")
    parser.add_argument("--algorithm", default="Mappo")
    parser.add_argument("--frames", type=int, default=2000, help="of a batch")
    parser.add_argument("--environments", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1, help="of training per batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whose", choices=["serial", "parallel", "ours"])
    arguments = parser.parse_args()
    if arguments.whose:
        run(arguments)
        return
    path = os.pathsep.join([str(MPE_TASKS), os.environ.get("PYTHONPATH", "")])
    rates: dict[str, list[float]] = {"serial": [], "parallel": [], "ours": []}
    for _ in range(arguments.rounds):
        for whose, values in rates.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--whose", whose]
            process = subprocess.run(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
                timeout=600,
            )
            line = json.loads(process.stdout.splitlines()[-1])
            values.append(line["frames_per_second"])
    for whose, values in rates.items():
        sys.stdout.write(
            f"{whose}: {statistics.median(values):,.0f} frames/s {values}\n"
        )
    best = max(statistics.median(rates[whose]) for whose in ("serial", "parallel"))
    ratio = statistics.median(rates["ours"]) / best
    sys.stdout.write(f"ours against BenchMARL's best: {ratio:.2f}\n")


if __name__ == "__main__":
    main()
