"""Environments, setups and settings of learners, drawn by families of algorithms."""

import random
from dataclasses import replace
from typing import Any

from drawn_env import Kind, draw_kind, draw_setup

from marl_collect.training.options import Setup

Drawn = tuple[Kind, Setup, dict[str, Any]]
"""An environment, a setup and settings."""
ACTOR_CRITIC = {"ippo": "ia2c", "mappo": "maa2c"}


def drawn(family: str, seed: int) -> Drawn:
    """Draw an environment, a setup and settings."""
    if family == "ppo":
        return drawn_ppo(seed)
    pick = random.Random(seed)
    return drawn_values(pick, seed) if family == "values" else drawn_maddpg(pick)


def drawn_ppo(seed: int) -> Drawn:
    pick = random.Random(seed)
    several = pick.random() < 0.5
    groups = {"red": pick.randint(1, 3)} | (
        {"blue": pick.randint(1, 2)} if several else {}
    )
    continuous = tuple(name for name in groups if pick.random() < 0.3)
    turns = pick.random() < 0.4
    kind = draw_kind(pick, groups, continuous=continuous, turns=turns)
    setup = draw_setup(pick, pick.choice(["ippo", "mappo"]))
    settings = {
        "gamma": pick.choice([1.0, 0.95, 0.6]),
        "reward": pick.choice(["agent", "team"]),
        "reward_scale": pick.choice([1.0, 0.3]),
        "standardise_rewards": seed % 3 == 0,
        "recurrent": pick.choice([None, None, "gru"]),
        "hidden_size": 6,
        "num_cells": pick.choice([(5,), (7, 4)]),
        "conv": "2k8s8",
        "ppo.lmbda": pick.choice([0.0, 0.7, 1.0]),
        "ppo.clip_epsilon": pick.choice([0.05, 0.2]),
        # The entropy of continuous actions is an estimate from random numbers.
        "ppo.entropy_coeff": 0.0 if continuous else pick.choice([0.0, 0.1]),
        "ppo.critic_coeff": pick.choice([0.5, 1.0]),
        "ppo.max_grad_norm": pick.choice([0.1, 100.0]),
        "ppo.sequence_frames": pick.choice([4, 5, 12]),
        "ppo.minibatch_frames": pick.choice([12, 1000]),
        "ppo.epochs": 2,
        "ppo.lr": 1e-3,
    }
    pick = random.Random(1000 + seed)
    memory = settings["recurrent"] is not None and pick.random() < 0.5
    settings |= {
        "ppo.recurrent_critic": memory,
        "ppo.target_tau": None if memory else pick.choice([None, 0.3]),
        "ppo.critic_lr": pick.choice([None, 3e-3]),
        "ppo.critic_num_cells": random.Random(seed).choice([None, (6, 3)]),
        "ppo.adam_eps": random.Random(seed).choice([1e-5, 1e-3]),
        "ppo.clip_apart": pick.random() < 0.5,
        "ppo.n_steps": pick.choice([None, None, 1, 2, 5]),
        "ppo.normalise_advantages": pick.random() < 0.6,
        "bootstrap_limits": pick.random() < 0.6,
        "ppo.huber_delta": pick.choice([None, 0.2, 1.0]),
        "ppo.clip_value": pick.choice([None, 0.002, 0.02]),
        "ppo.normalise_values": pick.random() < 0.5,
    }
    if pick.random() < 0.4:
        setup = replace(setup, algorithm=ACTOR_CRITIC[setup.algorithm])
    remembers = settings["recurrent"] is not None and setup.centralised
    remembers |= memory and central(setup)
    settings["ppo.popart"] = settings["ppo.normalise_values"] and pick.random() < 0.6
    settings["network"] = None if remembers or pick.random() < 0.3 else "attention"
    settings["last_action"] = random.Random(2000 + seed).random() < 0.4
    return kind, setup, settings


def whole(seed: int) -> bool:
    """Return whether the batch of a case has whole episodes, with padding."""
    return random.Random(2000 + seed).random() < 0.4


def central(setup: Setup) -> bool:
    """Return whether the critic sees all agents."""
    return setup.algorithm in ("mappo", "maa2c")


def drawn_values(pick: random.Random, seed: int) -> Drawn:
    algorithm = pick.choice(["iql", "vdn", "qmix"])
    recurrent = pick.choice([None, "gru"])
    replay = "auto" if recurrent else pick.choice(["auto", "frames", "episodes"])
    groups = {"red": pick.randint(1, 3)}
    turns = algorithm != "iql" and pick.random() < 0.4
    kind = draw_kind(pick, groups, turns=turns)
    setup = draw_setup(pick, algorithm)
    settings = {
        "gamma": pick.choice([1.0, 0.95, 0.6]),
        "reward": pick.choice(["agent", "team"]),
        "reward_scale": pick.choice([1.0, 0.3]),
        "standardise_rewards": pick.random() < 0.4,
        "num_cells": pick.choice([(5,), (7, 4)]),
        "recurrent": recurrent,
        "hidden_size": 6,
        "conv": "2k8s8",
        "value.lr": 1e-3,
        "value.replay": replay,
        "value.double_q": pick.random() < 0.5,
        "bootstrap_limits": pick.random() < 0.6,
        "value.tau": pick.choice([0.1, 1.0]),
        "value.target_interval": pick.choice([1, 2]),
        "value.minibatch_frames": 30,
        "value.minibatch_episodes": 5,
        "value.warm_up_frames": 0,
        "value.mixing_cells": 4,
        "value.mixing_gain": 1.0,
        "value.mixing_hyper_cells": pick.choice([0, 6]),
        "value.mixing_norm": pick.random() < 0.5,
        "value.max_grad_norm": pick.choice([0.1, 100.0]),
    }
    settings["last_action"] = random.Random(2000 + seed).random() < 0.4
    if setup.centralised and recurrent is None:
        settings["network"] = pick.choice([None, "attention"])
    return kind, setup, settings


def drawn_maddpg(pick: random.Random) -> Drawn:
    groups = {"red": pick.randint(1, 3)}
    if pick.random() < 0.5:
        groups["blue"] = pick.randint(1, 2)
    kind = draw_kind(pick, groups, discrete=False, continuous=tuple(groups))
    setup = draw_setup(pick, pick.choice(["maddpg", "maddpg", "iddpg"]))
    sees_several = setup.centralised or setup.algorithm == "maddpg"
    return (
        kind,
        setup,
        {
            "gamma": pick.choice([1.0, 0.95, 0.6]),
            "reward": pick.choice(["agent", "team"]),
            "reward_scale": pick.choice([1.0, 0.3]),
            "standardise_rewards": pick.random() < 0.4,
            "bootstrap_limits": pick.random() < 0.6,
            "num_cells": pick.choice([(5,), (7, 4)]),
            "conv": "2k8s8",
            "network": pick.choice([None, "attention"]) if sees_several else None,
            "value.lr": 1e-3,
            "value.policy_lr": pick.choice([None, 3e-3]),
            "value.tau": pick.choice([0.1, 1.0]),
            "value.target_interval": pick.choice([1, 2]),
            "value.noise": pick.choice([0.1, 1.5]),
            "value.action_penalty": pick.choice([0.0, 0.2]),
            "value.minibatch_frames": 30,
            "value.warm_up_frames": 0,
            "value.max_grad_norm": pick.choice([0.1, 100.0]),
        },
    )
