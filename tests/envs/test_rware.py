"""The warehouse gives the library's data; its time limit is a truncation."""

from functools import partial
from typing import Any

import gymnasium
import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")
pytest.importorskip("rware", reason="needs the extra rware")

from family_tools import assert_lists_equal, episodes

from marl_collect import check_env
from marl_collect.envs import RwareEnv
from marl_collect.envs.rware.provider import FAMILY

TINY = "rware-tiny-2ag-v2"


@pytest.mark.parametrize(
    ("task", "arguments"),
    [(TINY, {"max_steps": 30}), ("rware-small-4ag-hard-v2", {"max_steps": 45})],
)
def test_the_data_are_those_of_the_library(
    task: str, arguments: dict[str, Any]
) -> None:
    def flags(_env: Any, over: bool, frame: int) -> tuple[bool, bool]:
        assert over == (frame == limit)  # which the library calls a termination
        return False, over

    limit = arguments["max_steps"]
    # One environment for all episodes: the library's reset forgets the last one.
    env = gymnasium.make(task, disable_env_checker=True, **arguments)
    frames = 0
    for seed, episode in episodes(partial(RwareEnv, task, **arguments), 120):
        frames += assert_lists_equal(episode, env, seed, flags)
    assert frames == 120


def test_the_limit_is_that_of_the_task_or_a_shorter_one() -> None:
    for keywords, limit in [({}, 500), ({"time_limit": 40}, 40), ({"max_steps": 9}, 9)]:
        env = RwareEnv(TINY, **keywords)
        assert env.description.time_limit == limit
        env.close()
    assert RwareEnv(TINY, max_steps=None).description.time_limit is None


def test_check_env_with_messages_and_a_team_reward() -> None:
    factory = partial(
        RwareEnv, TINY, msg_bits=2, reward_type="global", max_steps=20, agent_ids=True
    )
    check_env(factory, episodes=2, steps=25)


def test_an_unknown_member_of_an_enumeration_is_an_error() -> None:
    with pytest.raises(ValueError, match="reward_type must be one of .*two_stage"):
        RwareEnv(TINY, reward_type="both")


def test_any_registered_task_is_found_and_some_are_listed() -> None:
    tasks = FAMILY.available_tasks()
    assert f"rware/{TINY}" in tasks
    for task in [*tasks, "rware/rware-large-19ag-v2"]:
        FAMILY.find_task(task)
    assert FAMILY.settings(f"rware/{TINY}")["max_steps"] == 500
    with pytest.raises(ValueError, match="^$"):
        FAMILY.find_task(TINY)
