"""The comparison that validates the fast path finds differences."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

from same_steps import compare
from support.zoo import Script, ScriptedEnv
from workloads.free import FreeEnv


def compared(env: Any, other_env: Any) -> Any:
    spaces = {agent: env.action_space(agent) for agent in env.possible_agents}
    return compare(env, other_env, spaces, steps=25, seed=0)


def test_equal_environments_pass_and_events_are_counted() -> None:
    script = Script(ends={"agent_0": (2, "terminated")}, max_cycles=5)
    tally = compared(ScriptedEnv(script), ScriptedEnv(script))
    assert tally == {
        "steps": 25,
        "episodes": 4,
        "deaths": 5,
        "terminations": 5,
        "truncations": 10,
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Script(max_cycles=4), "step 3"),
        (Script(ends={"agent_1": (2, "truncated")}), "termination of agent_1"),
        (Script(info=lambda i, s: {"a": s}), "info of agent_0"),
        (
            Script(observe=lambda i, s, a: np.array([i, s, -0.0], dtype=np.float32)),
            "observation of agent_0",
        ),
    ],
)
def test_a_difference_is_found_and_named(other: Script, message: str) -> None:
    script = Script(ends={"agent_1": (2, "terminated")})
    if other.max_cycles != script.max_cycles:
        script = Script()
    with pytest.raises(AssertionError, match=message):
        compared(ScriptedEnv(script), ScriptedEnv(other))


def test_a_reward_of_minus_zero_differs_from_zero() -> None:
    zeros, minus_zeros = FreeEnv(), FreeEnv()
    zeros._rewards = dict.fromkeys(zeros.possible_agents, 0.0)
    minus_zeros._rewards = dict.fromkeys(minus_zeros.possible_agents, -0.0)
    with pytest.raises(AssertionError, match="step 0, reward of agent_0"):
        compared(zeros, minus_zeros)
