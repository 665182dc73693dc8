"""ParallelEnv gives exactly the data of SerialEnv, with any spread over processes."""

from functools import partial
from typing import Any

import pytest
import torch
from support.scripts import run_python
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect.errors import ClosedError
from marl_collect.parallel_env import ParallelEnv, SerialEnv

SPREADS: list[dict[str, Any]] = [
    {"num_processes": 1},
    {"num_processes": 2},
    {"num_processes": 3, "groups": 2},
    {"envs_per_process": 1},
    {"num_processes": 2, "groups": 5},
    {"start_method": "spawn"},
]
ENVIRONMENTS = 5


def counting() -> CountingEnv:
    return CountingEnv(action_mask=True, state=True, image=(4, 4, 3))


def play(env: Any) -> list[TensorDictBase]:
    """Return the results of all TensorDict methods, with actions from one seed."""
    torch.manual_seed(0)
    env.set_seed(7)
    frames = [env.rollout(25, break_when_any_done=False)]
    root = env.reset()
    for turn in range(12):
        root["_step"] = torch.arange(ENVIRONMENTS) % 2 == turn % 2
        root = env.rand_action(root)
        step, root = env.step_and_maybe_reset(root)
        frames.append(step.exclude("_step"))
    root["_reset"] = (torch.arange(ENVIRONMENTS) > 2).unsqueeze(-1)
    frames.append(env.reset(root))
    frames.append(env.rand_step(frames[-1].clone()))
    env.set_seed(8)
    frames.append(env.reset())
    return frames


@pytest.fixture(scope="module")
def expected() -> list[TensorDictBase]:
    with SerialEnv(ENVIRONMENTS, counting) as env:
        return play(env)


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_data_equal_those_of_serial_env(
    expected: list[TensorDictBase], spread: dict[str, Any]
) -> None:
    with ParallelEnv(ENVIRONMENTS, counting, **spread) as env:
        actual = play(env)
    for actual_frame, expected_frame in zip(actual, expected, strict=True):
        assert set(actual_frame.keys(True, True)) == set(
            expected_frame.keys(True, True)
        )
        assert (actual_frame == expected_frame).all()


def test_a_serial_env_gives_the_same_data_as_its_environments_alone() -> None:
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


def test_shapes_and_spaces_are_those_of_one_environment_batched() -> None:
    with ParallelEnv(3, counting, num_processes=2) as env, counting() as single_env:
        assert env.batch_size == (3,)
        assert len(env) == 3
        assert env.group_map == single_env.group_map
        assert env.action_space == single_env.action_space
        fake, real = env.fake_tensordict(), env.rand_step(env.reset())
        assert fake.shape == (3,)
        assert fake["hunter"].shape == (3, 2)
        assert set(fake.keys(True, True)) == set(real.keys(True, True))
        for key, value in fake.items(True, True):
            assert real[key].shape == value.shape
            assert real[key].dtype == value.dtype


def test_images_come_from_every_environment() -> None:
    with ParallelEnv(3, counting, num_processes=2) as env:
        env.reset()
        root = env.reset()
        root["_step"] = torch.tensor([False, True, False])
        env.rand_step(root)
        assert [int(image.max()) for image in env.render()] == [0, 1, 0]


def test_a_batch_is_bound_to_its_own_memory_only() -> None:
    from marl_collect.core.description import allocate

    with ParallelEnv(2, counting) as env:
        engine = env.engine()
        other = allocate(engine.description.row(), (2,))
        with pytest.raises(ValueError, match="is not the memory that the processes"):
            engine.bind(other)
        engine.bind(engine.allocate())


def test_processes_do_not_import_torch() -> None:
    code = """
import sys
from marl_collect.parallel_env import ParallelEnv
from workloads.counting import CountingEnv

def make():
    env = CountingEnv()
    # Read in the process that steps it, by the attribute's name.
    type(env).torch_is_here = property(lambda self: "torch" in sys.modules)
    return env

env = ParallelEnv(2, make, num_processes=2)
batch = env.engine()
batch.bind(batch.allocate())
batch.reset([0, 1], [0, 1])
batch.step()
print(env.torch_is_here, "torch" in sys.modules)
env.close()
"""
    process = run_python("-c", code, interpreter=True)
    assert process.stdout == "[False, False] False\n", process.stderr


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_after_close_every_call_raises_an_error(kind: Any) -> None:
    env = kind(2, CountingEnv)
    assert not env.is_closed
    root = env.rand_action(env.reset())
    env.close()
    env.close()
    assert env.is_closed
    attribute = partial(env.get_attr, "steps")
    for call in (lambda: env.step(root), env.reset, env.render, attribute):
        with pytest.raises(ClosedError, match="is closed"):
            call()


@pytest.mark.parametrize("kind", [None, SerialEnv])
def test_what_is_no_tensordict_is_named(kind: Any) -> None:
    with kind(2, CountingEnv) if kind else CountingEnv() as env:
        root = env.reset()
        for wrong in ({"hunter": 1}, torch.zeros(2), 3):
            for method in (env.reset, env.rand_action, env.step, env.step_mdp):
                name = method.__name__
                with pytest.raises(TypeError, match=rf"{name}\(\) takes a TensorDict"):
                    method(wrong)
        with pytest.raises(KeyError, match=r"takes what step\(\) returned"):
            env.step_mdp(root)


def test_closing_before_the_first_use_works() -> None:
    with ParallelEnv(2, CountingEnv) as env:
        assert not env.is_closed
    with pytest.raises(ClosedError):
        env.reset()
