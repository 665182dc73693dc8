"""Training settings that work for the tasks that were tried."""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Three agents, 25 frames per episode. A small batch has many complete episodes.
    # Scaled rewards keep the critic's errors on the order of one.
    "simple_spread_v3": {
        "frames": 300_000,
        "frames_per_batch": 2_000,
        "envs_per_worker": 8,
        "gamma": 0.95,
        "reward": "team",
        "reward_scale": 0.1,
        "num_cells": (128, 128),
        "activation": "relu",
        "eval_interval": 25_000,
        "eval_episodes": 112,
        "final_episodes": 208,
        "value.epsilon_frames": 50_000,
        "ppo.lr": 7e-4,
        "ppo.epochs": 8,
        "ppo.minibatch_frames": 500,
    },
    # Episodes of 100 to 500 frames; a fall costs 100, a frame yields about one.
    "multiwalker_v9": {
        "frames": 500_000,
        "frames_per_batch": 4_000,
        "envs_per_worker": 8,
        "reward_scale": 0.1,
        "num_cells": (128, 128),
        "eval_interval": 50_000,
        "eval_episodes": 24,
        "final_episodes": 48,
        "ppo.epochs": 8,
        "ppo.entropy_coeff": 0.0,
        "ppo.minibatch_frames": 1_000,
    },
}
ENV_KWARGS: Mapping[str, Mapping[str, Any]] = {
    "multiwalker_v9": {"shared_reward": False},
}


def preset(task: str) -> Mapping[str, Any]:
    """Return the settings of a task, given with or without its family; may be empty."""
    return PRESETS.get(task.rpartition("/")[2], {})


def preset_env_kwargs(task: str) -> Mapping[str, Any]:
    """Return the environment's keyword arguments that belong to ``preset``."""
    return ENV_KWARGS.get(task.rpartition("/")[2], {})
