"""PettingZoo: groups of agents and the order of their rows."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv
from zoo_tools import scripted

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.envs.pettingzoo.groups import AgentSpec, group_agents


def test_a_group_map_has_the_agents_that_are_no_strings() -> None:
    raw: Any = ScriptedEnv()
    raw.possible_agents = [0, (0, 1), "a"]
    env = PettingZooWrapper(raw, group_map={"y": [0], "x": [(0, 1), "a"]})
    assert list(env.group_map.items()) == [("y", ["0"]), ("x", ["(0, 1)", "a"])]
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


ACTIONS: Any = {a: spaces.Discrete(i + 2) for i, a in enumerate(Script().agents)}
NO_MAP = "must be a mapping from group to agents"


@pytest.mark.parametrize(
    ("script", "group_map", "error", "message"),
    [
        (UNLIKE, MarlGroupMapType.ALL_IN_ONE_GROUP, ValueError, "agent_0.*group_map="),
        (Script(action=ACTIONS), {"x": Script().agents}, ValueError, "in Discrete.2"),
        (Script(), "agents", ValueError, "must be one of .*'one_group_per_agent'"),
        (Script(), ["agent_0"], TypeError, NO_MAP),
        (Script(), 3, TypeError, NO_MAP),
    ],
)
def test_a_group_map_that_does_not_fit_is_an_error(
    script: Script, group_map: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scripted(script, group_map=group_map)


def test_a_group_that_is_split_or_renamed_leaves_the_other_names_alone() -> None:
    sizes = {"a_0": 1, "a_1": 2, "a_kind0_0": 3, "a_kind0__0": 4, "collector_0": 1}
    sizes |= {"collector_agents_0": 2, "collector_agents_1": 2}
    specs = [
        AgentSpec(name, name, "", 0, spaces.Box(0, 1, (size,)), spaces.Discrete(2))
        for name, size in sizes.items()
    ]
    groups = group_agents(specs, None, parallel=True)
    assert groups == {
        "a_kind0__": ["a_0"],
        "a_kind1": ["a_1"],
        "a_kind0": ["a_kind0_0"],
        "a_kind0_": ["a_kind0__0"],
        "collector_agents_": ["collector_0"],
        "collector_agents": ["collector_agents_0", "collector_agents_1"],
    }
