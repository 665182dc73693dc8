"""PettingZoo wrappers: groups, keys, shapes, flags, masks, seeds."""

from typing import Any

import pytest
import torch
from conformance_tools import (
    ACTION,
    GROUPS,
    LENGTH,
    OBSERVATION,
    Implementation,
    Walk,
    in_turns,
    times,
    walk,
)

FLAGS = ("done", "terminated", "truncated")


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        (None, GROUPS),
        ("ALL_IN_ONE_GROUP", {"agents": ["walker_0", "walker_1", "goal_0"]}),
        ("ONE_GROUP_PER_AGENT", {a: [a] for a in ("walker_0", "walker_1", "goal_0")}),
    ],
)
def test_names_or_a_group_map_type_decide_on_groups(
    implementation: Any, kind: str | None, groups: Any
) -> None:
    kinds = implementation.MarlGroupMapType
    options = {"zoo_group_map": getattr(kinds, kind)} if kind else {}
    env = walk(implementation, **options)
    assert env.group_map == groups
    assert {name for name in groups if name in env.reset().keys()} == set(groups)


def test_a_given_group_map_orders_the_agents(implementation: Any) -> None:
    groups = {"b": ["goal_0", "walker_1"], "a": ["walker_0"]}
    td = walk(implementation, zoo_group_map=groups).reset()
    assert td["b", "observation"][:, 1].tolist() == [2, 1]
    assert td["a", "observation"].shape == (1, 3)


@pytest.mark.parametrize(
    "groups",
    [
        {"a": ["walker_0"]},
        {"a": ["walker_0", "walker_1", "goal_0"], "b": ["goal_0"]},
        {"a": ["walker_0", "walker_1", "goal_0", "nobody"]},
        {"a": ["walker_0", "walker_1", "goal_0"], "b": []},
    ],
)
def test_wrong_group_maps_are_value_errors(implementation: Any, groups: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        walk(implementation, zoo_group_map=groups)


def test_reset_has_observations_and_flags_but_no_rewards(implementation: Any) -> None:
    td = walk(implementation).reset()
    assert td.batch_size == ()
    assert td["walker"].batch_size == (2,)
    assert td["goal"].batch_size == (1,)
    assert td[OBSERVATION].shape == (2, 3)
    assert td[OBSERVATION].dtype == torch.float32
    assert td["goal", "observation"].shape == (1, 3)
    for flag in FLAGS:
        assert td[flag].shape == (1,)
        assert td["walker", flag].shape == (2, 1)
        assert td["walker", flag].dtype == torch.bool
        assert not td[flag].any()
    assert "reward" not in td["walker"].keys()
    assert "next" not in td.keys()


def test_a_step_writes_under_next(implementation: Any) -> None:
    env = walk(implementation)
    td = env.reset()
    td[ACTION] = torch.tensor([1, 3])
    td["goal", "action"] = torch.tensor([0])
    stepped = env.step(td)
    assert stepped["next", "walker", "reward"].tolist() == [[2], [4]]
    assert stepped["next", "walker", "reward"].dtype == torch.float32
    assert times(stepped) == 0
    assert times(stepped["next"]) == 1


@pytest.mark.parametrize("truncates", [False, True])
def test_the_last_step_is_terminated_or_truncated(
    implementation: Any, truncates: bool
) -> None:
    last = walk(implementation, truncates=truncates).rollout(99)[..., -1]["next"]
    assert last["done"].all()
    assert last["walker", "done"].all()
    assert (last["terminated"] != truncates).all()
    assert (last["walker", "terminated"] != truncates).all()
    assert (last["truncated"] == truncates).all()


def test_a_rollout_ends_with_the_episode(implementation: Any) -> None:
    td = walk(implementation).rollout(99)
    assert td.batch_size == (LENGTH,)
    assert td.names[-1] == "time"
    assert times(td).tolist() == list(range(LENGTH))
    assert torch.equal(times(td["next"]), times(td) + 1)
    td = walk(implementation).rollout(2 * LENGTH, break_when_any_done=False)
    assert times(td).tolist() == [*range(LENGTH), *range(LENGTH)]
    assert td["next", "done"].sum() == 2


def test_random_actions_have_the_spaces_shapes(implementation: Any) -> None:
    for box, shape, dtype in (
        (False, (2,), torch.int64),
        (True, (2, 2), torch.float32),
    ):
        env = walk(implementation, box=box)
        action = env.rand_action(env.reset())[ACTION]
        assert action.shape == shape
        assert action.dtype == dtype


def test_actions_may_be_one_hot(implementation: Any) -> None:
    env = walk(implementation, zoo_categorical_actions=False)
    td = env.rand_action(env.reset())
    assert td[ACTION].shape == (2, 4)
    assert (td[ACTION].sum(-1) == 1).all()
    td[ACTION] = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]]).to(td[ACTION].dtype)
    assert env.step(td)["next", "walker", "reward"].tolist() == [[3], [1]]


def test_masks_limit_random_actions(implementation: Any) -> None:
    env = walk(implementation, masks=True)
    td = env.rollout(LENGTH)
    assert td["walker", "action_mask"].shape == (LENGTH, 2, 4)
    assert td["walker", "action_mask"].dtype == torch.bool
    assert (td[ACTION] == 1).all()
    assert ("next", "walker", "action_mask") in td.keys(True)
    actions = [env.rand_action(env.reset())[ACTION] for _ in range(8)]
    assert (torch.stack(actions) == 1).all()


def test_numbers_in_infos_are_entries(implementation: Any) -> None:
    td = walk(implementation, weights=True).rollout(LENGTH)
    weight = td["next", "walker", "info", "weight"]
    assert weight.shape == (LENGTH, 2, 1)
    assert weight[:, 0, 0].tolist() == [1, 2, 3, 4, 5]


def test_the_state_is_an_entry_on_request(implementation: Any) -> None:
    assert "state" not in walk(implementation).reset().keys()
    td = walk(implementation, zoo_return_state=True).rollout(LENGTH)
    assert td["state"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert td["next", "state"][:, 1].tolist() == [1, 2, 3, 4, 5]


def test_seeds_repeat_an_episode(implementation: Any) -> None:
    env = walk(implementation)
    observations = []
    for seed in (3, 3, 4):
        env.set_seed(seed)
        observations.append(env.reset()[OBSERVATION])
    assert torch.equal(observations[0], observations[1])
    assert not torch.equal(observations[0], observations[2])


def test_set_seed_returns_the_next_seed(implementation: Any) -> None:
    env = walk(implementation)
    assert env.set_seed(7) == 881585298
    assert env.set_seed(7, static_seed=True) == 7


def dying(implementation: Implementation, **options: Any) -> Any:
    """Return a rollout in which a walker dies in the second of five steps."""
    options = {"zoo_use_mask": True, "zoo_done_on_any": False, **options}
    return walk(implementation, death=2, **options).rollout(99)


def test_an_agent_that_died_is_masked_and_stays_done(implementation: Any) -> None:
    td = dying(implementation)
    assert td.batch_size == (LENGTH,)
    assert td["walker", "mask"][:, 0].all()
    assert td["walker", "mask"][:, 1].tolist() == [True, True, False, False, False]
    after = [False] + 4 * [True]
    assert td["next", "walker", "mask"][:, 1].tolist() == [not done for done in after]
    assert td["next", "walker", "done"][:, 1, 0].tolist() == after
    assert td["next", "walker", "terminated"][:, 1, 0].tolist() == after
    assert td["next", "done"][:, 0].tolist() == 4 * [False] + [True]
    walkers = td["next", "walker"]
    assert walkers["observation"][1, 1, 0] == 2
    assert walkers["reward"][1, 1] >= 1
    assert not walkers["observation"][2:, 1].any()
    assert not walkers["reward"][2:, 1].any()


def test_an_agent_that_terminated_is_never_truncated(implementation: Any) -> None:
    assert not dying(implementation)["next", "walker", "truncated"].any()


@pytest.mark.parametrize("options", [{}, {"zoo_done_on_any": True}])
def test_one_death_ends_a_parallel_episode_by_default(
    implementation: Any, options: Any
) -> None:
    env = walk(implementation, death=2, zoo_use_mask=True, **options)
    assert env.rollout(99).batch_size == (2,)


def test_deaths_need_a_mask(implementation: Any) -> None:
    env = walk(implementation, death=2, zoo_use_mask=False, zoo_done_on_any=False)
    with pytest.raises(ValueError, match="mask"):
        env.rollout(99)


def test_there_is_no_mask_by_default(implementation: Any) -> None:
    assert "mask" not in walk(implementation).reset()["walker"].keys()


def turns(implementation: Implementation, **options: Any) -> Any:
    return implementation.PettingZooWrapper(in_turns(**options), use_mask=True)


def test_in_turns_one_agent_acts_per_step_and_is_a_group(implementation: Any) -> None:
    agents = ["walker_0", "walker_1", "goal_0"]
    env = turns(implementation)
    assert env.group_map == {agent: [agent] for agent in agents}
    td = env.rollout(6)
    acting = [td[a, "mask"][:, 0] for a in agents]
    assert (
        torch.stack(acting, -1).to(torch.int).tolist()
        == 2 * torch.eye(3, dtype=torch.int).tolist()
    )


def test_in_turns_deaths_are_no_error(implementation: Any) -> None:
    td = turns(implementation, death=2).rollout(99)
    assert td["next", "done"][-1]


def test_turns_need_a_mask(implementation: Any) -> None:
    with pytest.raises(ValueError, match="mask"):
        implementation.PettingZooWrapper(in_turns(), use_mask=False)


def test_closing_is_noted(implementation: Any) -> None:
    raw = Walk()
    env = implementation.PettingZooWrapper(raw)
    env.reset()
    env.close()
    assert raw.closed
    assert env.is_closed


def test_attributes_of_the_environment_are_visible(implementation: Any) -> None:
    assert walk(implementation, length=3).length == 3
