"""The contract holds for any order in which agents die, join, vanish and come back."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import check_env

AGENTS = [f"agent_{i}" for i in range(4)]
REASONS = ["terminated", "truncated", "both"]


def scripts(reasons: list[str]) -> st.SearchStrategy[Script]:
    """Episodes of four agents, the first of which is present from the beginning."""
    ends = st.dictionaries(
        st.sampled_from(AGENTS),
        st.tuples(st.integers(1, 6), st.sampled_from(reasons)),
        max_size=4,
    )
    joins = st.dictionaries(st.sampled_from(AGENTS[1:]), st.integers(1, 9), max_size=3)
    # Late enough for turn-based agents to be removed first, which takes a round.
    returns = st.dictionaries(st.sampled_from(AGENTS), st.integers(8, 12), max_size=3)
    return st.builds(
        Script,
        n_agents=st.just(4),
        ends=ends,
        joins=joins,
        returns=returns,
        max_cycles=st.integers(1, 14),
    )


KEYWORDS = st.fixed_dictionaries(
    {
        "done_on_any": st.booleans(),
        "agent_ids": st.booleans(),
        "episode_reward": st.booleans(),
        "return_state": st.booleans(),
        "group_map": st.sampled_from(
            [None, *MarlGroupMapType, {"b": AGENTS[:0:-1], "a": AGENTS[:1]}]
        ),
    }
)


@pytest.mark.filterwarnings("ignore:scripted_v0. agent")
@settings(max_examples=30)
@given(script=scripts([*REASONS, "vanished"]), keywords=KEYWORDS)
def test_parallel_environments(script: Any, keywords: Any) -> None:
    check_env(lambda: PettingZooWrapper(ScriptedEnv(script), **keywords), episodes=1)


@settings(max_examples=30)
@given(script=scripts(REASONS), keywords=KEYWORDS)
def test_turn_based_environments(script: Any, keywords: Any) -> None:
    check_env(lambda: PettingZooWrapper(ScriptedTurns(script), **keywords), episodes=1)
