"""PettingZoo: groups of agents and the order of their rows."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns
from zoo_tools import scripted

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooEnv, PettingZooWrapper

AGENTS = Script().agents


@pytest.mark.parametrize(
    ("raw", "group_map", "groups"),
    [
        (ScriptedEnv, None, {"agent": AGENTS}),
        (ScriptedTurns, None, {agent: [agent] for agent in AGENTS}),
        (ScriptedEnv, MarlGroupMapType.ALL_IN_ONE_GROUP, {"agents": AGENTS}),
        (ScriptedEnv, "one_group_per_agent", {agent: [agent] for agent in AGENTS}),
        (ScriptedEnv, {"b": AGENTS[::-2], "a": AGENTS[1:2]}, None),
    ],
)
def test_groups_and_their_order_follow_the_group_map(
    raw: Any, group_map: Any, groups: Any
) -> None:
    """Which rows their agents have, the oracle shows."""
    env = PettingZooWrapper(raw(), group_map=group_map)
    assert env.group_map == (groups or group_map)
    assert list(env.group_map) == list(groups or group_map)


@pytest.mark.parametrize(
    ("group_map", "message"),
    [
        ({"a": ["agent_0", "agent_1"]}, r"missing: \['agent_2'\]"),
        ({"a": ["agent_0", "agent_1", "agent_2", "x"]}, r"unknown: \['x'\]"),
        ({"a": ["agent_0", "agent_1", "agent_2", "agent_2"]}, "repeated"),
        (
            {"next": ["agent_0", "agent_1", "agent_2"]},
            r"reserved group names: .'next'",
        ),
    ],
)
def test_a_group_map_must_name_every_agent_exactly_once(
    group_map: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scripted(group_map=group_map)


def test_a_group_map_has_the_agents_that_are_no_strings() -> None:
    raw: Any = ScriptedEnv()
    raw.possible_agents = [0, (0, 1), "a"]
    env = PettingZooWrapper(raw, group_map={"x": [(0, 1), "a"], "y": [0]})
    assert env.group_map == {"x": ["(0, 1)", "a"], "y": ["0"]}
    with pytest.raises(ValueError, match=r"unknown: \[7, None\]"):
        PettingZooWrapper(raw, group_map={"x": [(0, 1), "a"], "y": [0, 7, None]})


UNLIKE = Script(
    observation={
        "agent_0": spaces.Box(0, 9, (2,), np.float32),
        "agent_1": spaces.Box(0, 9, (4,), np.float32),
        "agent_2": spaces.Box(0, 9, (2,), np.float32),
    },
    observe=lambda i, step, action: np.full(4 if i == 1 else 2, i, dtype=np.float32),
)


def test_agents_of_one_prefix_with_different_spaces_get_different_groups() -> None:
    env = scripted(UNLIKE)
    assert env.env.group_map == {
        "agent_kind0": ["agent_0", "agent_2"],
        "agent_kind1": ["agent_1"],
    }
    assert env["agent_kind1", "observation"].tolist() == [[1, 1, 1, 1]]


def test_different_spaces_in_a_requested_group_are_an_error_with_advice() -> None:
    with pytest.raises(ValueError, match=r"agent_0 observes.*agent_1.*group_map="):
        scripted(UNLIKE, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)


def test_different_action_spaces_in_one_group_are_an_error() -> None:
    names = enumerate(Script().agents)
    actions: dict[str, Any] = {a: spaces.Discrete(i + 2) for i, a in names}
    with pytest.raises(ValueError, match=r"acts in Discrete\(2\)"):
        scripted(Script(action=actions), group_map={"x": Script().agents})


def test_an_error_closes_what_the_constructor_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[Any] = []

    def close(self: Any) -> None:
        closed.append(self)

    monkeypatch.setattr(ScriptedEnv, "close", close)
    wrong = {"x": ["nobody"]}
    with pytest.raises(ValueError, match="unknown"):
        PettingZooEnv("support.zoo:ScriptedEnv", group_map=wrong)
    assert len(closed) == 1
    raw = ScriptedEnv()  # Still the user's.
    with pytest.raises(ValueError, match="unknown"):
        PettingZooWrapper(raw, group_map=wrong)
    assert len(closed) == 1


def test_an_unknown_name_of_a_group_map_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be one of .*'one_group_per_agent'"):
        scripted(group_map="agents")


@pytest.mark.parametrize("wrong", [["agent_0"], 3])
def test_a_group_map_of_another_type_is_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="must be a mapping from group to agents"):
        scripted(group_map=wrong)
