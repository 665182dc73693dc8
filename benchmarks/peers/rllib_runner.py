"""Runner: RLlib's MultiAgentEnvRunner, one actor per worker, random actions."""

import logging
import os
from typing import Any

import ray
from harness.served import System
from harness.windows import Measure, measure_parts
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger  # noqa: F401
from ray.tune.registry import register_env
from workloads.table import WORKLOADS

from peers.storing import FRAMES


def build(system: System) -> Measure:
    """Start the actors and return what measures them."""
    count = system.options["environments"]
    workload = WORKLOADS[system.workload]
    ray.init(
        num_cpus=max(system.workers + 1, os.cpu_count() or 1),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    register_env("workload", lambda _: ParallelPettingZooEnv(workload.stock()))
    config = (
        PPOConfig()
        .environment("workload", disable_env_checking=True)
        .env_runners(
            num_env_runners=system.workers,
            num_envs_per_env_runner=max(1, count // system.workers),
            rollout_fragment_length=FRAMES // count,
            explore=True,
        )
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
    )
    actor: Any = ray.remote(num_cpus=1)(MultiAgentEnvRunner)
    actors = [
        actor.remote(config=config.copy(copy_frozen=False), worker_index=index + 1)
        for index in range(system.workers)
    ]
    each = FRAMES // system.workers

    def part() -> tuple[int, int, bool]:
        answers = ray.get(
            [a.sample.remote(num_timesteps=each, random_actions=True) for a in actors]
        )
        episodes = [episode for answer in answers for episode in answer]
        frames = 0
        for episode in episodes:
            frames += len(episode)
            for single in episode.agent_episodes.values():
                for values in (single.observations, single.rewards, single.actions):
                    for value in values:
                        value.sum() if hasattr(value, "sum") else value
        over = sum(episode.is_done for episode in episodes)
        return frames, over, over > 0

    part()
    return measure_parts(part)
