"""BenchMARL's MAPPO on simple_spread, with our collector.

    pip install "marl-collect[benchmarl,mpe]"
    python examples/benchmarl_mappo.py --iterations 40

BenchMARL's own script differs in the import of ``Experiment``. Writes ``progress.csv``
and BenchMARL's results to ``--out``.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--frames", type=int, default=6000, help="per iteration")
parser.add_argument("--epochs", type=int, default=10, help="per iteration")
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("runs/benchmarl_mappo"))
arguments = parser.parse_args()

try:
    from benchmarl.algorithms import MappoConfig
    from benchmarl.environments import PettingZooTask
    from benchmarl.experiment import Callback, ExperimentConfig
    from benchmarl.models import MlpConfig

    from marl_collect.interop.benchmarl import Experiment
    from marl_collect.training.run_folder import write_table
except ImportError as error:
    install = 'pip install "marl-collect[benchmarl,mpe]"'
    raise SystemExit(f"{error}: {install}") from error


rows: list[tuple[object, object]] = [("frames", "return")]


class Progress(Callback):
    """Prints progress, and writes it to ``progress.csv``."""

    def on_batch_collected(self, _batch):
        """Record the mean return of the episodes that ended in the batch."""
        iteration = self.experiment.n_iters_performed
        mean = self.experiment.mean_return
        print(f"iteration {iteration}: mean return {mean:.2f}", flush=True)
        rows.append((self.experiment.total_frames, float(mean)))
        write_table(arguments.out, rows)


config = ExperimentConfig.get_from_yaml()
config.max_n_frames = arguments.frames * arguments.iterations
config.on_policy_collected_frames_per_batch = arguments.frames
config.on_policy_n_envs_per_worker = 4
config.on_policy_n_minibatch_iters = arguments.epochs
config.lr = arguments.lr
config.evaluation_interval = arguments.frames
config.evaluation_episodes = 1
config.render = False
config.loggers = ["csv"]
arguments.out.mkdir(parents=True, exist_ok=True)
config.save_folder = str(arguments.out)

experiment = Experiment(
    task=PettingZooTask.SIMPLE_SPREAD.get_from_yaml(),
    algorithm_config=MappoConfig.get_from_yaml(),
    model_config=MlpConfig.get_from_yaml(),
    seed=arguments.seed,
    config=config,
    callbacks=[Progress()],
)
experiment.run()
print("mean return:", experiment.mean_return)
