"""BenchMARL's QMIX without learning: collected returns with its collector and with ours.

    make build/versions/oldest/.made
    PYTHONPATH=build/versions/oldest:benchmarks/peers/mpe_tasks \
        python benchmarks/benchmarl_returns.py --seeds 20

For each seed both experiments have the same weights, a learning rate of 0 and a fixed
epsilon, so their returns differ only by chance or by a defect. BenchMARL gives all
environments of an experiment the same seed, so its episodes begin in far fewer states.
"""

import argparse
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from benchmarl.algorithms import QmixConfig
from benchmarl.environments import PettingZooTask
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models import MlpConfig
from scipy import stats

from marl_collect.interop import benchmarl as bridge

STEPS, ENVIRONMENTS = 100, 10  # Steps of an episode of BenchMARL's simple_spread.


def experiment(kind: Any, seed: int, episodes: int, epsilon: float, folder: str) -> Any:
    """Build an experiment that neither learns nor changes its exploration."""
    config = ExperimentConfig.get_from_yaml()
    settings: dict[str, Any] = {
        "loggers": [],
        "create_json": False,
        "render": False,
        "evaluation": False,
        "lr": 0.0,
        "exploration_eps_init": epsilon,
        "exploration_eps_end": epsilon,
        "max_n_frames": episodes * STEPS * ENVIRONMENTS,
        "off_policy_collected_frames_per_batch": STEPS * ENVIRONMENTS,
        "off_policy_n_envs_per_worker": ENVIRONMENTS,
        "off_policy_n_optimizer_steps": 1,
        "off_policy_init_random_frames": 0,
        "save_folder": folder,
    }
    for name, value in settings.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return kind(
        task=PettingZooTask.SIMPLE_SPREAD.get_from_yaml(),
        algorithm_config=QmixConfig.get_from_yaml(),
        model_config=MlpConfig.get_from_yaml(),
        seed=seed,
        config=config,
    )


def collect(made: Any) -> tuple[float, int]:
    """Run it; return the mean return of an agent, and in how many states episodes begin."""
    batches: list[Any] = []
    made._on_batch_collected = lambda batch: batches.append(batch.clone())  # noqa: SLF001
    before = [value.clone() for value in made.policy.parameters()]
    made.run()
    after = made.policy.parameters()
    assert all(map(torch.equal, before, after))
    data = torch.cat(batches, dim=1)
    returns = data["next", "agent", "episode_reward"][:, STEPS - 1 :: STEPS]
    assert data["next", "done"][:, STEPS - 1 :: STEPS].all()
    begins = data["state"][:, ::STEPS].flatten(0, 1)
    return returns.mean().item(), len(begins.unique(dim=0))


def main() -> None:
    """Run both for each seed; print means, standard errors and tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=4, help="of each environment")
    parser.add_argument("--epsilon", type=float, default=0.5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"BenchMARL": [], "ours": []}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            options = seed, arguments.episodes, arguments.epsilon, folder
            stock = experiment(Experiment, *options)
            ours = experiment(bridge.Experiment, *options)
            ours.policy.load_state_dict(stock.policy.state_dict())
            ours.collector.update_policy_weights_()
            for name, made in (("BenchMARL", stock), ("ours", ours)):
                mean, begins = collect(made)
                found[name].append(mean)
                sys.stdout.write(f"seed {seed} {name}: {mean:.2f}, {begins} beginnings\n")
                sys.stdout.flush()
    for name, values in found.items():
        error = stats.sem(values)
        sys.stdout.write(f"{name}: {np.mean(values):.2f} ± {error:.2f} (s.e.)\n")
    welch = stats.ttest_ind(*found.values(), equal_var=False)
    paired = stats.ttest_rel(*found.values())
    sys.stdout.write(f"Welch p = {welch.pvalue:.2f}, paired p = {paired.pvalue:.2f}\n")


if __name__ == "__main__":
    main()
