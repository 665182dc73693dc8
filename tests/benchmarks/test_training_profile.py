"""The profile of a training run has all its time, and every part has some."""

from functools import partial

import pytest

pytest.importorskip("torchrl", reason="needs the extra torchrl")

import training_profile
from workloads.counting import CountingEnv

from marl_collect import describe
from marl_collect.training.options import TrainingOptions
from marl_collect.training.trainer import Task

OPTIONS = TrainingOptions().with_settings(
    {
        "frames": 240,
        "frames_per_batch": 80,
        "workers": 1,
        "envs_per_worker": 2,
        "max_frames_per_traj": 10,
        "eval_interval": 240,
        "eval_episodes": 1,
        "final_episodes": 1,
        "ppo.epochs": 2,
    }
)


def test_every_part_takes_time_and_the_rest_is_not_negative() -> None:
    factory = partial(CountingEnv, n_prey=0)
    task = Task("task", factory, describe(factory), {})
    profiler = training_profile.Profiler()
    total = training_profile.train(task, OPTIONS, profiler)
    parts = profiler.seconds()
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert sum(parts.values()) <= total
    assert profiler.resets >= 160 / 10


def test_parts_of_a_few_per_cent_are_printed_with_their_limits() -> None:
    parts = {"a": 0.5, "b": 0.02, "c": 0.2}
    lines = training_profile.table(parts, 1.0, {"a": 1e-6, "b": 2e-6}, 1_000)
    assert lines[2:] == [
        "| a | 500.0 | 50% | 1.0 |",
        "| collecting around these, logs | 280.0 | 28% | 0.0 |",
        "| c | 200.0 | 20% | 0.0 |",
        "| all | 1,000.0 | 100% | 3.0 |",
    ]
