"""BenchMARL's QMIX without learning: returns with its collector and with ours.

    make build/versions/oldest/.made
    PYTHONPATH=build/versions/oldest:benchmarks/peers/mpe_tasks \
        python benchmarks/benchmarl_returns.py --seeds 20

For each seed all experiments have the same weights, a learning rate of 0 and a fixed
epsilon. BenchMARL gives all environments of an experiment the same seed, so their
episodes begin in the same states. ``reseeded`` is BenchMARL with a seed for each
environment. P-values are of permutation tests of the difference in means.

First, greedy episodes from our workers are repeated frame by frame: BenchMARL's policy
acts in TorchRL's environment, which is reset with the episode's seed.
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

from marl_collect.core.seeding import episode_seed
from marl_collect.interop import benchmarl as bridge

STEPS, ENVIRONMENTS, PERMUTATIONS = 100, 10, 20_000
KEYS = ["state", ("agent", "observation"), ("agent", "action")]
NEXT = ["state", "done", ("agent", "observation"), ("agent", "reward")]


def experiment(kind: Any, seed: int, episodes: int, epsilon: float, folder: str) -> Any:
    """Build an experiment that neither learns nor changes its exploration."""
    config = ExperimentConfig.get_from_yaml()
    config.loggers, config.create_json, config.save_folder = [], False, folder
    config.render = config.evaluation = False
    config.lr, config.off_policy_n_optimizer_steps = 0.0, 1
    config.exploration_eps_init = config.exploration_eps_end = epsilon
    config.max_n_frames = episodes * STEPS * ENVIRONMENTS
    config.off_policy_collected_frames_per_batch = STEPS * ENVIRONMENTS
    config.off_policy_n_envs_per_worker = ENVIRONMENTS
    return kind(
        task=PettingZooTask.SIMPLE_SPREAD.get_from_yaml(),
        algorithm_config=QmixConfig.get_from_yaml(),
        model_config=MlpConfig.get_from_yaml(),
        seed=seed,
        config=config,
    )


def equal_experiments(*arguments: Any) -> dict[str, Any]:
    """Build the three experiments, with the weights of the first."""
    experiments = {
        "BenchMARL": experiment(Experiment, *arguments),
        "reseeded": experiment(Experiment, *arguments),
        "ours": experiment(bridge.Experiment, *arguments),
    }
    for name in ("reseeded", "ours"):
        experiments[name].policy.load_state_dict(
            experiments["BenchMARL"].policy.state_dict()
        )
        experiments[name].collector.update_policy_weights_()
    experiments["reseeded"].collector.set_seed(arguments[0])
    experiments["reseeded"].collector.reset()
    return experiments


def collect(experiment_run: Any) -> Any:
    """Run an experiment; return its frames ``[environment, frame]``."""
    batches: list[Any] = []
    experiment_run._on_batch_collected = lambda batch: batches.append(batch.clone())  # noqa: SLF001
    before = [value.clone() for value in experiment_run.policy.parameters()]
    experiment_run.run()
    after = list(experiment_run.policy.parameters())
    assert before
    assert all(map(torch.equal, before, after))
    frames: Any = torch.cat(batches, dim=1)
    assert frames["next", "done"][:, STEPS - 1 :: STEPS].all()
    return frames


def replay(seed: int, folder: str) -> str:
    """Repeat greedy episodes of ours with BenchMARL's policy and environment."""
    experiments = equal_experiments(seed, 1, 0.0, folder)
    frames = collect(experiments["ours"])
    policy = experiments["BenchMARL"].policy
    env = experiments["BenchMARL"].task.get_env_fun(1, False, seed, "cpu")()
    worst = dict.fromkeys([*KEYS, *(("next", key) for key in NEXT)], 0.0)
    for k in range(ENVIRONMENTS):
        expected = env.reset(seed=episode_seed(seed, k, 0))
        for frame in frames[k].unbind(0):
            with torch.no_grad():
                expected = env.step(policy(expected))
            for key in worst:
                difference = (frame[key].double() - expected[key].double()).abs().max()
                worst[key] = max(worst[key], difference.item())
            expected = expected["next"]
    for name in ("BenchMARL", "reseeded"):
        experiments[name].close()
    title = f"replay of {frames.numel()} greedy frames, largest differences:"
    return "\n".join(
        [title, *(f"  {key}: {difference:.1e}" for key, difference in worst.items())]
    )


def p_values(returns: list[float], other_returns: list[float]) -> tuple[float, float]:
    """Return p of a two-sample permutation test, and of one paired by seed."""
    generator = np.random.default_rng(0)
    size = len(returns)
    difference = abs(np.mean(returns) - np.mean(other_returns)) - 1e-9
    pooled = np.tile([*returns, *other_returns], (PERMUTATIONS, 1))
    mixed = generator.permuted(pooled, axis=1)
    means = mixed[:, :size].mean(1) - mixed[:, size:].mean(1)
    signs = generator.choice([-1, 1], (PERMUTATIONS, size))
    paired = (signs * np.subtract(returns, other_returns)).mean(1)
    return (abs(means) >= difference).mean(), (abs(paired) >= difference).mean()


def main() -> None:
    """Replay one seed, run all seeds, and print means, standard errors and tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=4, help="of each environment")
    parser.add_argument("--epsilon", type=float, default=0.5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    means: dict[str, list[float]] = {"BenchMARL": [], "reseeded": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(replay(0, folder) + "\n")
        for seed in range(arguments.seeds):
            experiments = equal_experiments(
                seed, arguments.episodes, arguments.epsilon, folder
            )
            for name, experiment_run in experiments.items():
                batch = collect(experiment_run)
                returns = batch["next", "agent", "reward"].mean().item() * STEPS
                means[name].append(returns)
                states = len(batch["state"][:, ::STEPS].flatten(0, 1).unique(dim=0))
                best = batch["agent", "action_value"].argmax(-1)
                greedy = (batch["agent", "action"] == best).double().mean()
                sys.stdout.write(
                    f"seed {seed} {name}: return {returns:.2f}, first states "
                    f"{states}, greedy actions {greedy:.3f}\n"
                )
                sys.stdout.flush()
    for name, values in means.items():
        spread = np.std(values, ddof=1)
        sys.stdout.write(
            f"{name}: {np.mean(values):.1f} ± {spread / len(values) ** 0.5:.1f} "
            f"(standard error); deviation between seeds {spread:.1f}\n"
        )
    for name in ("BenchMARL", "reseeded"):
        unpaired, paired = p_values(means["ours"], means[name])
        sys.stdout.write(
            f"ours and {name}: p = {unpaired:.2f}; paired by seed, p = {paired:.2f}\n"
        )


if __name__ == "__main__":
    main()
