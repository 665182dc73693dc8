"""Learners: the time of a gradient step, with what prepares its batch.

A row is an algorithm on simple_spread with its default settings and one thread. The
work is what ``update`` does with a batch of the default size, per gradient step.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from harness.turns import Alternative
from tensordict import TensorDictBase

from cases.case import Case
from marl_collect import Collector
from marl_collect.envs import PettingZooEnv
from marl_collect.training.learner import Learner, learner_of
from marl_collect.training.options import Setup, TrainingOptions

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "IPPO": ("ippo-local-shared", {}),
    "MAPPO": ("mappo-local-shared", {}),
    "IPPO, GRU, T = 50": (
        "ippo-local-shared",
        {"recurrent": "gru", "ppo.sequence_frames": 50},
    ),
    **{
        f"{algorithm.upper()}{', GRU' if recurrent else ''}": (
            f"{algorithm}-local-shared",
            {"value.warm_up_frames": 0} | recurrent,
        )
        for recurrent in ({}, {"recurrent": "gru"})
        for algorithm in ("iql", "vdn", "qmix")
    },
    "MADDPG": ("maddpg-local-shared", {"value.warm_up_frames": 0}),
}


def build(stack: ExitStack, setup: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the alternative of a row."""
    stack.enter_context(torch.enable_grad())
    options = TrainingOptions().with_settings(settings)
    parsed = Setup.parse(setup)
    continuous = parsed.algorithm == "maddpg"
    factory = partial(PettingZooEnv, "simple_spread_v3", continuous_actions=continuous)
    description = factory().description
    learner = learner_of(parsed.algorithm)(description, parsed, options, seed=0)
    with Collector(
        factory,
        learner.policy,
        frames_per_batch=options.frames_per_batch,
        envs_per_worker=options.envs_per_worker,
        seed=0,
    ) as collector:
        batch = collector.next()
    assert batch is not None
    return {"ours": Alternative(partial(train, learner, batch.clone()))}


def train(learner: Learner, batch: TensorDictBase) -> float:
    """Learn from a batch; return the number of gradient steps."""
    before = learner.updates
    learner.update(batch, progress=0.5)
    return float(learner.updates - before)


def cases() -> list[Case]:
    """Return a row per algorithm."""
    return [
        Case(name, partial(build, setup=setup, settings=settings), "step", "ms")
        for name, (setup, settings) in ROWS.items()
    ]
