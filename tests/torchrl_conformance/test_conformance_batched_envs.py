"""SerialEnv and ParallelEnv: several environments as one."""

from typing import Any

import pytest
import torch
from conformance_tools import ACTION, LENGTH, OBSERVATION, Implementation, forked, times

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


def acted(env: Any, td: Any = None, action: int = 1) -> Any:
    """Return a TensorDict with actions for every agent."""
    td = env.reset() if td is None else td
    for group in ("walker", "goal"):
        td[group, "action"] = torch.full_like(
            td[group, "observation"][..., 0], action
        ).to(torch.int64)
    return td


def test_the_first_dimension_is_the_environment(env: Any) -> None:
    assert env.batch_size == (SIZE,)
    td = env.reset()
    assert td.batch_size == (SIZE,)
    assert td[OBSERVATION].shape == (SIZE, 2, 3)
    assert td["walker"].batch_size == (SIZE, 2)
    assert td["done"].shape == (SIZE, 1)
    assert env.num_workers == SIZE
    assert list(env.label) == ["walk", "walk"]


def test_a_step_steps_every_environment(env: Any) -> None:
    td = acted(env)
    td[ACTION][1] = 3
    stepped = env.step(td)
    assert times(stepped["next"]).tolist() == [1, 1]
    assert stepped["next", "walker", "reward"][..., 0].tolist() == [[2, 2], [4, 4]]


def test_a_step_changes_no_earlier_result(env: Any) -> None:
    frame = env.step(acted(env))
    copy = frame.clone()
    env.step(acted(env, frame["next"].clone()))
    assert torch.equal(frame["next", *OBSERVATION], copy["next", *OBSERVATION])


def test_a_rollout_has_time_behind_the_environments(env: Any) -> None:
    td = env.rollout(99)
    assert td.batch_size == (SIZE, LENGTH)
    assert td.names[-1] == "time"
    assert times(td).tolist() == SIZE * [list(range(LENGTH))]


def test_a_rollout_takes_a_policy(env: Any) -> None:
    td = env.rollout(3, lambda td: acted(env, td, 2))
    assert td.batch_size == (SIZE, 3)
    assert (td[ACTION] == 2).all()
    assert (td["next", "walker", "reward"] == 3).all()


def test_a_rollout_may_continue_over_episodes(env: Any) -> None:
    td = env.rollout(2 * LENGTH, break_when_any_done=False)
    assert times(td).tolist() == SIZE * [[*range(LENGTH), *range(LENGTH)]]
    assert td["next", "done"].sum() == 2 * SIZE


def test_a_rollout_may_end_with_the_last_environment(implementation: Any) -> None:
    makes = [implementation.make(length=3), implementation.make(length=5)]
    env = implementation.SerialEnv(2, makes)
    td = env.rollout(99, break_when_any_done=False, break_when_all_done=True)
    assert td.shape == (2, 5)
    env.close()


def test_a_rollout_ends_with_the_first_environment(implementation: Any) -> None:
    makes = [implementation.make(length=3), implementation.make(length=5)]
    env = implementation.SerialEnv(2, makes)
    assert env.rollout(99).shape == (2, 3)
    env.close()


def test_a_rollout_goes_on_from_a_tensordict(env: Any) -> None:
    start = env.step(acted(env))["next"]
    td = env.rollout(2, auto_reset=False, tensordict=start)
    assert times(td).tolist() == SIZE * [[1, 2]]


def test_a_rollout_calls_back(env: Any) -> None:
    calls = []
    env.rollout(3, callback=lambda _, td: calls.append(times(td).tolist()))
    assert len(calls) == 3


def test_some_environments_may_be_reset(env: Any) -> None:
    td = env.step(acted(env))["next"]
    td = td.exclude("reward").set("_reset", torch.tensor([[True], [False]]))
    result = env.reset(td)
    assert times(result).tolist() == [0, 1]


def test_step_and_maybe_reset_gives_the_next_root(env: Any) -> None:
    td = acted(env)
    for _ in range(LENGTH):
        stepped, td = env.step_and_maybe_reset(acted(env, td))
    assert stepped["next", "done"].all()
    assert not td["done"].any()
    assert times(td).tolist() == [0, 0]
    assert times(stepped["next"]).tolist() == [LENGTH, LENGTH]


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
    td = acted(env).set("_step", torch.tensor([True, False]))
    stepped = env.step(td)
    assert times(stepped["next"]).tolist() == [1, 0]


def test_actions_of_a_wrong_shape_are_errors(env: Any) -> None:
    td = acted(env)
    td[ACTION] = torch.zeros(SIZE, 2, 7, dtype=torch.int64)
    with pytest.raises((RuntimeError, ValueError)):
        env.step(td)


def test_every_environment_may_have_a_factory(implementation: Any) -> None:
    makes = [implementation.make(length=3), implementation.make(length=4)]
    env = implementation.SerialEnv(2, makes)
    td = env.rollout(12, break_when_any_done=False)
    assert td["next", "done"].sum(1)[:, 0].tolist() == [4, 3]
    env.close()


def test_the_number_of_factories_must_agree(implementation: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        implementation.SerialEnv(3, [implementation.make()] * 2)


@pytest.mark.parametrize(
    ("keywords", "ends"),
    [({"length": 2}, [3, 3]), ([{"length": 2}, {"length": 3}], [3, 2])],
)
def test_keywords_go_to_all_factories_or_to_one(
    implementation: Any, keywords: Any, ends: list[int]
) -> None:
    env = implementation.SerialEnv(2, implementation.make(), create_env_kwargs=keywords)
    td = env.rollout(6, break_when_any_done=False)
    assert td["next", "done"].sum(1)[:, 0].tolist() == ends
    env.close()


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
