"""The TensorDict methods of one environment and of a batch."""

import pytest
import torch
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect.parallel_env import SerialEnv


def test_rollout_stops_or_continues_at_the_end_of_an_episode() -> None:
    with CountingEnv() as env:
        short = env.rollout(100)
        assert short.names == ["time"]
        assert short["next", "done"][-1].all()
        assert not short["next", "done"][:-1].any()
        long = env.rollout(40, break_when_any_done=False)
        assert long.shape == (40,)
        dones = long["next", "done"][:-1, 0]
        steps = long["hunter", "observation"][1:, 0, 1]
        assert (steps[dones] == 0).all()
        truncated = env.rollout(2, set_truncated=True)
        assert truncated["next", "done"][-1].all()
        assert truncated["next", "hunter", "done"][-1].all()


def test_hidden_state_is_carried_and_cleared() -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        hidden = td.get("hidden", torch.zeros(2, 1))
        td.set("hidden", hidden)
        td.set(("hunter", "action"), torch.zeros(2, 2, dtype=torch.int64))
        td.set(("prey", "action"), torch.zeros(2, 3, 2))
        return td.set(("next", "hidden"), hidden + 1)

    with SerialEnv(2, CountingEnv) as env:
        rollout = env.rollout(40, policy, break_when_any_done=False)
    steps = rollout["hunter", "observation"][..., 0, 1]
    alive = rollout["hunter", "mask"][..., 0]
    assert rollout["next", "done"].any()
    assert torch.equal(rollout["hidden"][..., 0][alive], steps[alive])


def test_fake_tensordict_has_the_keys_of_a_step() -> None:
    with CountingEnv() as env:
        fake = env.fake_tensordict()
        real = env.rand_step(env.reset())
        assert set(fake.keys(True, True)) == set(real.keys(True, True))
        for key in fake.keys(True, True):
            assert fake[key].shape == real[key].shape, key
            assert fake[key].dtype == real[key].dtype, key


def test_misuse_is_explained() -> None:
    with CountingEnv() as env:
        with pytest.raises(RuntimeError, match="reset"):
            env.rand_step()
        root = env.reset()
        with pytest.raises(KeyError, match="hunter/action"):
            env.step(root)
        env.rand_action(root)
        root["hunter", "action"] = torch.zeros(2, 1)
        with pytest.raises(ValueError, match=r"expected shape \[2\]"):
            env.step(root)
        root["hunter", "action"] = torch.full((2,), 0.9)
        with pytest.raises(TypeError, match="float32: expected integers, torch.int64"):
            env.step(root)
        with pytest.raises(ValueError, match="max_steps"):
            env.rollout(0)
        rollout = env.rollout(100)
        with pytest.raises(RuntimeError, match="is over"):
            env.rand_step(rollout[-1].exclude("next"))
