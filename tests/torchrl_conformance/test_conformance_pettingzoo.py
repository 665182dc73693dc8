"""PettingZoo wrappers: groups, keys, shapes, flags, masks, seeds."""

from itertools import count
from typing import Any

import pytest
import torch
from conformance_tools import (
    ACTION,
    LENGTH,
    OBSERVATION,
    WALKERS,
    Implementation,
    Walk,
    check_same,
    in_turns,
    walk,
)

DEATHS: dict[str, Any] = {"death": 2, "zoo_done_on_any": False}


def episodes(env: Any) -> list[Any]:
    """Return the first frame, an episode, and frames of several ones."""
    steps = count()

    def act(td: Any) -> Any:
        td = env.rand_action(td)
        for group, agents in env.group_map.items():
            action = td[group, "action"]
            numbers = (torch.arange(len(agents)) + next(steps)) % 4
            if action.is_floating_point():
                action.copy_(torch.stack([numbers / 4, -numbers / 4], -1))
            else:
                one_hot = torch.nn.functional.one_hot(numbers, 4)
                action.copy_(one_hot if action.ndim == 2 else numbers)
        return td

    frames = env.rollout(12, act, break_when_any_done=False)
    return [env.reset(), env.rollout(99, act), frames]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zoo_use_mask": False},
        {"zoo_group_map": "ALL_IN_ONE_GROUP"},
        {"zoo_group_map": "ONE_GROUP_PER_AGENT"},
        {"zoo_group_map": {"b": ["goal_0", "walker_1"], "a": ["walker_0"]}},
        {"truncates": True},
        {"box": True},
        {"zoo_categorical_actions": False},
        {"masks": True},
        {"zoo_return_state": True},
        DEATHS,
    ],
    ids=str,
)
def test_episodes_are_the_same(options: dict[str, Any]) -> None:
    group_maps = []

    def play(implementation: Implementation) -> list[Any]:
        keywords = {"zoo_use_mask": True, **options}
        kind = keywords.get("zoo_group_map")
        if isinstance(kind, str):
            kinds = implementation.MarlGroupMapType
            keywords["zoo_group_map"] = getattr(kinds, kind)
        env = walk(implementation, **keywords)
        group_maps.append(env.group_map)
        played = episodes(env)
        # See test_an_agent_that_terminated_is_never_truncated.
        flag = ("walker", "truncated")
        apart = (flag, ("next", *flag)) if options is DEATHS else ()
        return [td.exclude(*apart) for td in played]

    check_same(play)
    assert group_maps[0] == group_maps[1]


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


def test_masks_limit_random_actions(implementation: Any) -> None:
    env = walk(implementation, masks=True)
    actions = [env.rand_action(env.reset())[ACTION] for _ in range(8)]
    assert (torch.stack([*actions, *env.rollout(LENGTH)[ACTION]]) == 1).all()


def test_numbers_in_infos_are_entries(implementation: Any) -> None:
    td = walk(implementation, weights=True).rollout(LENGTH)
    weight = td["next", "walker", "info", "weight"]
    assert weight.shape == (LENGTH, 2, 1)
    assert weight[:, 0, 0].tolist() == [1, 2, 3, 4, 5]


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


def test_an_agent_that_terminated_is_never_truncated(implementation: Any) -> None:
    td = walk(implementation, zoo_use_mask=True, **DEATHS).rollout(99)
    assert not td["next", "walker", "truncated"].any()


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
    agents = [*WALKERS, "goal_0"]
    env = turns(implementation)
    assert env.group_map == {agent: [agent] for agent in agents}
    td = env.rollout(6)
    acting = torch.stack([td[a, "mask"][:, 0] for a in agents], -1)
    assert torch.equal(acting, torch.eye(3).repeat(2, 1).bool())


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
