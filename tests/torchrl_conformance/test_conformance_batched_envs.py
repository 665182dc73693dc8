"""SerialEnv and ParallelEnv: several environments as one."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_tools import (
    ACTION,
    LENGTH,
    OBSERVATION,
    Implementation,
    check_same,
    forked,
    times,
)

pytestmark = pytest.mark.processes

SIZE = 2


def build(implementation: Implementation, kind: str) -> Any:
    """Return two environments."""
    with forked():
        env = getattr(implementation, kind)(SIZE, implementation.make())
        env.reset()
    return env


@pytest.fixture(params=["SerialEnv", "ParallelEnv"])
def env(request: Any, implementation: Any, shared: Any) -> Any:
    """Two environments at the beginning of an episode."""
    env = shared(build, implementation, request.param)
    env.reset()
    return env


def acting(number: int = 0) -> Callable[[Any], Any]:
    """Return a policy whose actions depend on world, agent, frame and a number."""

    def act(td: Any) -> Any:
        for group in ("walker", "goal"):
            seen = td[group, "observation"]
            start = number + torch.arange(len(seen))[:, None]
            td[group, "action"] = (seen[..., 0] + seen[..., 1] + start).long() % 4
        return td

    return act


MANY: dict[str, Callable[[Implementation], Any]] = {
    "factories": lambda names: names.SerialEnv(
        3, [names.make(length=length, zoo_use_mask=True) for length in (3, 4, LENGTH)]
    ),
    "a factory": lambda names: names.SerialEnv(
        3, names.make(zoo_use_mask=True), create_env_kwargs={"length": 2}
    ),
    "a factory with options": lambda names: names.SerialEnv(
        3,
        names.make(zoo_use_mask=True),
        create_env_kwargs=[{"length": length} for length in (4, 2, LENGTH)],
    ),
}


def played(env: Any, seed: int) -> list[Any]:
    """Return what random calls return, each as it is after all of them."""
    draw = random.Random(seed)
    td, out = env.reset(), []
    for _ in range(15):
        act = acting(draw.randrange(4))
        call = draw.choice(["step", "step and reset", "reset", "rollout", "continue"])
        if call == "step and reset":
            frame, td = env.step_and_maybe_reset(act(td))
            out.append(frame)
        elif call in ("rollout", "continue"):
            options = {"break_when_any_done": draw.random() < 0.5}
            if call == "continue":
                options |= {"auto_reset": False, "tensordict": td}
            out.append(env.rollout(draw.randint(1, 12), act, **options))
            td = env.reset()
        else:
            reset = torch.tensor([[draw.random() < 0.5] for _ in range(3)])
            if call == "step":
                frame = env.step(act(td))
                td, reset = env.step_mdp(frame), frame["next", "done"]
                out.append(frame)
            if reset.any():
                td = env.reset(td.set("_reset", reset.clone())).exclude("_reset")
        # TorchRL's roots keep the last actions.
        out.append(td.clone().exclude(ACTION, ("goal", "action")))
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", MANY)
def test_random_calls_return_the_same(kind: str, seed: int) -> None:
    def play(implementation: Implementation) -> list[Any]:
        env = MANY[kind](implementation)
        out = played(env, seed)
        env.close()
        return out

    check_same(play)


def test_a_rollout_may_end_with_the_last_environment(implementation: Any) -> None:
    makes = [implementation.make(length=3), implementation.make(length=5)]
    env = implementation.SerialEnv(2, makes)
    td = env.rollout(99, break_when_any_done=False, break_when_all_done=True)
    assert td.shape == (2, 5)
    env.close()


def test_a_rollout_calls_back(env: Any) -> None:
    calls = []
    env.rollout(3, callback=lambda _, td: calls.append(times(td).tolist()))
    assert len(calls) == 3


def test_a_random_step_is_a_step(env: Any) -> None:
    td = env.rand_step(env.reset())
    assert td[ACTION].shape == (SIZE, 2)
    assert td[ACTION].dtype == torch.int64
    reward = td["next", "walker", "reward"][..., 0]
    assert torch.equal(reward, td[ACTION].float() + 1)


def test_seeds_repeat_and_differ_between_environments(env: Any) -> None:
    observations = []
    for seed in (3, 3, 4):
        env.set_seed(seed)
        observations.append(env.reset()[OBSERVATION].clone())
    assert torch.equal(observations[0], observations[1])
    assert not torch.equal(observations[0], observations[2])
    assert not torch.equal(observations[0][0], observations[0][1])


def test_set_seed_returns_the_seed_after_the_last(env: Any) -> None:
    assert env.set_seed(7) == 1971665544
    assert env.set_seed(7, static_seed=True) == 7


def test_a_static_seed_is_every_environment_s(env: Any) -> None:
    env.set_seed(7, static_seed=True)
    td = env.reset()
    assert torch.equal(td[OBSERVATION][0], td[OBSERVATION][1])


def test_methods_are_called_in_every_environment(env: Any) -> None:
    assert list(env.twice(4)) == [8, 8]


def test_private_attributes_are_not_dispatched(env: Any) -> None:
    with pytest.raises(AttributeError):
        _ = env._there_is_none


def test_some_environments_may_step_alone(env: Any) -> None:
    td = acting()(env.reset()).set("_step", torch.tensor([True, False]))
    stepped = env.step(td)
    assert times(stepped["next"]).tolist() == [1, 0]


def test_actions_of_a_wrong_shape_are_errors(env: Any) -> None:
    td = acting()(env.reset())
    td[ACTION] = torch.zeros(SIZE, 2, 7, dtype=torch.int64)
    with pytest.raises((RuntimeError, ValueError)):
        env.step(td)


def test_the_number_of_factories_must_agree(implementation: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        implementation.SerialEnv(3, [implementation.make()] * 2)


def test_a_closed_batch_says_so(implementation: Any) -> None:
    env = implementation.SerialEnv(2, implementation.make())
    env.reset()
    assert not env.is_closed
    env.close()
    assert env.is_closed


def test_batches_nest(implementation: Any) -> None:
    env = implementation.SerialEnv(2, implementation.batch_of(3))
    assert env.reset().batch_size == (2, 3)
    env.close()


def test_attributes_of_attributes_are_reached(implementation: Any) -> None:
    with forked():
        env = implementation.ParallelEnv(SIZE, implementation.make())
        env.reset()
    assert env.label.upper() == ["WALK", "WALK"]
    env.close()
