"""SerialEnv: the TensorDict interface of several environments in this process."""

from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.parallel_env import SerialEnv


def test_it_gives_the_same_data_as_its_environments_alone() -> None:
    """Environment 0 of a batch has the seeds of a single environment."""
    with SerialEnv(3, CountingEnv) as batch, CountingEnv() as single_env:
        for env in (batch, single_env):
            env.set_seed(11)
        torch.manual_seed(0)
        rollout = batch.rollout(30, break_when_any_done=False)
        actions = {g: rollout[0][g, "action"] for g in batch.group_map}
        root = single_env.reset()
        for frame in range(30):
            for group, group_actions in actions.items():
                root[group, "action"] = group_actions[frame]
            step, root = single_env.step_and_maybe_reset(root)
            assert (step == rollout[0, frame]).all()


def test_environments_built_before_an_error_are_closed() -> None:
    closed: list[CountingEnv] = []

    def good() -> CountingEnv:
        env: Any = CountingEnv()
        close = env.close

        def noting() -> None:
            closed.append(env)
            close()

        env.close = noting
        return env

    with pytest.raises(CountingError):
        SerialEnv(3, [good, good, lambda: CountingEnv(fault=Fault("raise", "create"))])
    assert len(closed) == 2
