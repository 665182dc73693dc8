"""Episodes that end with the first agent are named once, where people would see it."""

import warnings
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchrl")

from support.zoo import Script, ScriptedEnv

from marl_collect import Collector, check_env, record
from marl_collect.core.description import EnvDescription
from marl_collect.envs import PettingZooWrapper
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner
from marl_collect.training.value_decomposition import ValueLearner

pytestmark = pytest.mark.processes

DEATH = Script(ends={"agent_1": (3, "terminated")}, max_cycles=6)
TOGETHER = Script(
    ends={f"agent_{i}": (3, "terminated") for i in range(3)}, max_cycles=6
)
LIMIT = Script(max_cycles=3)
MESSAGE = "scripted_v0: an episode ended when the first agent was done.*done_on_any="


def wrapped(script: Script, **options: Any) -> Any:
    return PettingZooWrapper(ScriptedEnv(script), **options)


QUIET = [
    partial(wrapped, TOGETHER),
    partial(wrapped, LIMIT),
    partial(wrapped, DEATH, done_on_any=False),
]


def warned(call: Any) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return sum("first agent was done" in str(w.message) for w in caught)


@pytest.mark.parametrize("group_map", [None, "one_group_per_agent"])
def test_check_env_says_that_episodes_end_with_the_first_agent(group_map: Any) -> None:
    def check(factory: Any) -> None:
        check_env(partial(factory, group_map=group_map))

    with pytest.warns(UserWarning, match=MESSAGE):
        check(partial(wrapped, DEATH))
    assert warned(lambda: check(partial(wrapped, DEATH))) == 1
    for factory in QUIET:
        assert not warned(lambda factory=factory: check(factory))


@pytest.mark.parametrize("kind", [PPOLearner, ValueLearner])
def test_learners_say_it_once(kind: Any) -> None:
    settings = {"num_cells": (4,), "ppo.epochs": 1, "value.warm_up_frames": 10**6}
    options = TrainingOptions().with_settings(settings)
    setup = Setup("ippo" if kind is PPOLearner else "vdn")

    def train(factory: Any) -> None:
        with factory() as env:
            description: EnvDescription = env.description
        learner = kind(description, setup, options, seed=0)
        size: Any = {"frames_per_batch": 20, "total_frames": 60}
        with Collector(factory, learner.policy, **size) as collector:
            for batch in collector:
                learner.update(batch, 0.1)

    assert warned(lambda: train(partial(wrapped, DEATH))) == 1
    for factory in QUIET:
        assert not warned(lambda factory=factory: train(factory))


def test_record_says_it_once(tmp_path: Any) -> None:
    options: Any = {"frames": 60, "frames_per_batch": 20}
    factory = partial(wrapped, DEATH)
    assert warned(lambda: record(tmp_path / "data", factory, **options)) == 1
