"""Training settings: of tasks that were tried, and of published implementations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from marl_collect.options import did_you_mean, nearest

TASK_SETTINGS: Mapping[str, Mapping[str, Any]] = {
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


def task_settings(task: str) -> Mapping[str, Any]:
    """Return the settings of a task, given with or without its family; may be empty."""
    return TASK_SETTINGS.get(task.rpartition("/")[2], {})


def task_env_kwargs(task: str) -> Mapping[str, Any]:
    """Return the environment's keyword arguments that belong to ``task_settings``."""
    return ENV_KWARGS.get(task.rpartition("/")[2], {})


@final
@dataclass(frozen=True)
class Episodes:
    """A number of frames: those of so many episodes that last until the time limit."""

    count: int


@final
@dataclass(frozen=True)
class Preset:
    """Settings of a published implementation.

    Attributes:
        source: where they are from.
        setups: names of the setups that it trains.
        settings: by algorithm; a number of frames may be given in ``Episodes``.
        missing: by algorithm, what cannot be set like there.
    """

    source: str
    setups: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]
    missing: Mapping[str, str]

    def settings_of(self, algorithm: str, time_limit: int | None) -> dict[str, Any]:
        """Return the settings of an algorithm for a task.

        Args:
            algorithm: name in the table of algorithms.
            time_limit: frames after which an episode of the task is truncated.

        Raises:
            ValueError: if there are none, or if the task has no time limit.
        """
        if algorithm not in self.settings:
            raise ValueError(
                f"The preset has settings of {', '.join(self.settings)}, but not of "
                f"{algorithm}. Its source is {self.source}."
            )
        settings = dict(self.settings[algorithm])
        for name, value in settings.items():
            if isinstance(value, Episodes):
                if time_limit is None:
                    raise ValueError(
                        f"{name} is {value.count} episodes in the preset, but episodes "
                        "of this task have no time limit: pass --set "
                        "max_frames_per_traj=FRAMES."
                    )
                settings[name] = value.count * time_limit
        return settings


def find_preset(name: str) -> Preset:
    """Return the preset of a name.

    Raises:
        ValueError: if there is none; lists all.
    """
    if name not in PRESETS:
        hint = did_you_mean(nearest(name, list(PRESETS), most=1))
        raise ValueError(
            f"There is no preset {name!r}.{hint} Expected one of {', '.join(PRESETS)}."
        )
    return PRESETS[name]


# EPyMARL, src/config: default.yaml, envs/gymma.yaml and algs/*.yaml.
_EPYMARL = {
    "frames": 2_050_000,
    "workers": 1,
    "gamma": 0.99,
    "reward": "team",  # Standardised, so that the sum is the same as the mean.
    "standardise_rewards": True,
    "bootstrap_limits": False,
    "activation": "relu",
    "eval_interval": 50_000,
    "eval_episodes": 100,
    "final_episodes": 100,
}
_EPYMARL_MEMORY = {"recurrent": "gru", "num_cells": (128,), "hidden_size": 128}
_EPYMARL_VALUES = _EPYMARL | {
    "frames_per_batch": Episodes(1),
    "envs_per_worker": 1,
    "value.prefetch": False,
    "value.replay": "episodes",
    "value.buffer_frames": Episodes(5_000),
    "value.minibatch_episodes": 32,
    "value.episodes_per_update": 1,
    "value.warm_up_frames": Episodes(32),  # Until a minibatch can be drawn.
    "value.double_q": True,
    "value.tau": 1.0,
    "value.target_interval": 200,
    "value.max_grad_norm": 10.0,
}
_EPYMARL_MIXED = _EPYMARL_VALUES | {
    "num_cells": (64, 64),
    "value.lr": 5e-4,
    "value.epsilon_frames": 50_000,
}
_EPYMARL_PPO = (
    _EPYMARL
    | _EPYMARL_MEMORY
    | {
        "frames": 20_050_000,
        "frames_per_batch": 50,
        "envs_per_worker": 10,
        "ppo.episodes_per_batch": 10,
        "ppo.lr": 3e-4,
        "ppo.epochs": 4,
        "ppo.minibatch_frames": Episodes(10),
        "ppo.sequence_frames": Episodes(1),
        "ppo.clip_epsilon": 0.2,
        "ppo.entropy_coeff": 0.001,
        "ppo.critic_coeff": 1.0,
        "ppo.adam_eps": 1e-8,
        "ppo.max_grad_norm": 10.0,
        "ppo.clip_apart": True,
        "ppo.n_steps": 5,
        "ppo.target_tau": 0.01,
        "ppo.critic_num_cells": (128, 128),
        "ppo.recurrent_critic": False,
        "ppo.normalise_advantages": False,
    }
)
_EPYMARL_A2C = {
    name: value
    for name, value in _EPYMARL_PPO.items()
    if name not in ("ppo.epochs", "ppo.minibatch_frames", "ppo.clip_epsilon")
} | {"ppo.lr": 5e-4}
_EPYMARL_A2C_MISSING = (
    "the value after the last frame of the longest episode of a batch is not added"
)
_EPYMARL_PPO_MISSING = (
    f"{_EPYMARL_A2C_MISSING}; returns are computed once per batch, not in each epoch"
)
_EPYMARL_ALL_MISSING = (
    "the last evaluation of 100 episodes has seeds of its own; random actions fill the "
    "buffer until training begins"
)
# train_mpe_spread.sh, and the defaults of config.py. The script passes --use_ReLU, an
# option that switches ReLU off.
_ON_POLICY = {
    "frames": 20_000_000,
    "workers": 1,
    "envs_per_worker": 128,
    "frames_per_batch": Episodes(128),
    "gamma": 0.99,
    "reward": "team",  # Values are standardised, so the sum is the same as the mean.
    "activation": "tanh",
    "recurrent": "gru",
    "num_cells": (64, 64),
    "hidden_size": 64,
    "ppo.lr": 7e-4,
    "ppo.epochs": 10,
    "ppo.minibatch_frames": Episodes(128),
    "ppo.sequence_frames": 10,
    "ppo.clip_epsilon": 0.2,
    "ppo.lmbda": 0.95,
    "ppo.entropy_coeff": 0.01,
    "ppo.critic_coeff": 1.0,
    "ppo.max_grad_norm": 10.0,
    "ppo.clip_apart": True,
    "ppo.huber_delta": 10.0,
    "ppo.clip_value": 0.2,
    "ppo.normalise_values": True,
    "ppo.orthogonal": True,
    "ppo.policy_gain": 0.01,
    "bootstrap_limits": False,
}
PRESETS: Final[Mapping[str, Preset]] = {
    "epymarl": Preset(
        "EPyMARL (github.com/uoe-agents/epymarl at cbc38c0, src/config)",
        [
            f"{name}-local-shared-ids"
            for name in ("ippo", "mappo", "ia2c", "maa2c", "iql", "vdn", "qmix")
        ],
        {
            "ippo": _EPYMARL_PPO,
            "mappo": _EPYMARL_PPO,
            "ia2c": _EPYMARL_A2C,
            "maa2c": _EPYMARL_A2C | {"ppo.entropy_coeff": 0.01},
            "iql": _EPYMARL_VALUES
            | _EPYMARL_MEMORY
            | {"value.lr": 3e-4, "value.epsilon_frames": 200_000},
            "vdn": _EPYMARL_MIXED,
            "qmix": _EPYMARL_MIXED
            | {
                "value.mixing_cells": 32,
                "value.mixing_hyper_cells": 64,
                "value.mixing_gain": 1.0,
                "value.mixing_norm": False,
            },
        },
        dict.fromkeys(("ippo", "mappo"), _EPYMARL_PPO_MISSING)
        | dict.fromkeys(("ia2c", "maa2c"), _EPYMARL_A2C_MISSING)
        | dict.fromkeys(("iql", "vdn", "qmix"), _EPYMARL_ALL_MISSING),
    ),
    "mappo": Preset(
        "MAPPO's script for simple_spread (github.com/marlbenchmark/on-policy, "
        "onpolicy/scripts/train_mpe_scripts/train_mpe_spread.sh)",
        ["mappo-local-shared"],
        {"mappo": _ON_POLICY},
        {
            "mappo": "no normalisation of observations and layers; values are "
            "standardised by the moments of all returns, not by moving averages; "
            "every third sequence has 5 frames instead of 10, because episodes have 25"
        },
    ),
}
"""The presets of ``marl-collect compare``."""
