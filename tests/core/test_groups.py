"""Groups of agents, and environments that are collected together."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from workloads.counting import CountingEnv

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.factories import check_alike
from marl_collect.core.groups import check_groups, group_by_prefix


def test_only_a_number_separates_a_prefix() -> None:
    agents = ["wolf_0", "wolf_b", "wolf_10", "a_1_2", "_3", "shepherd", "x_", "wolf"]
    assert group_by_prefix(agents) == {
        "wolf": ("wolf_0", "wolf_10", "wolf"),
        "wolf_b": ("wolf_b",),
        "a_1": ("a_1_2",),
        "_3": ("_3",),
        "shepherd": ("shepherd",),
        "x_": ("x_",),
    }


def test_every_agent_is_named_once() -> None:
    check_groups({"a": ["x", "y"]}, ["y", "x"])
    with pytest.raises(ValueError, match="missing: \\['z'\\]") as raised:
        check_groups({"a": ["x", "x"], "done": [], "b": ["w"]}, ["x", "z"])
    for part in ("unknown: ['w']", "repeated: ['x']", "empty groups: ['done']"):
        assert part in str(raised.value)
    assert "reserved group names: ['done']" in str(raised.value)
    with pytest.raises(ValueError, match="names that are empty or no text: .0, ''"):
        check_groups({0: ["x"], "": ["y"]}, ["x", "y"])  # type: ignore[dict-item]


@pytest.mark.parametrize("more_keys", [False, True])
def test_environments_with_other_keys_are_refused(more_keys: bool) -> None:
    plain, with_state = (CountingEnv(state=s).description for s in (False, True))
    pair = (plain, with_state) if more_keys else (with_state, plain)
    with pytest.raises(ValueError, match="but state is .* in environment 1 and"):
        check_alike(*pair, "environment 1", "environment 0")
    check_alike(plain, plain, "environment 1", "environment 0")


def described(agents: str = "ab", n: Any = 2, **changes: Any) -> EnvDescription:
    action: Any = spaces.Discrete(n) if isinstance(n, int) else n
    action = spaces.MultiDiscrete(n) if isinstance(n, list) else action
    group = GroupDescription(tuple(agents), spaces.Box(0, 1, (2,)), action)
    return EnvDescription("drawn", {"g": group}, **changes)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (described(), described("ba"), r"the agents of g is \['b', 'a'\] in environme"),
        (described(), described(n=3), "the number of g/action is 3 in environment 1"),
        (described(n=[2, 5]), described(n=[5, 2]), r"g/action is \[5, 2\]"),
        (described(), described(done_on_any=True), "done_on_any is True"),
        (
            described(n=spaces.Box(0, 1, (2,))),
            described(n=spaces.Box(0, np.array([1, 2]), (2,))),
            r"the interval of g/action is \[\[0.0, 0.0\], \[1.0, 2.0\]\] in",
        ),
    ],
)
def test_environments_with_other_agents_or_actions_are_refused(
    one: EnvDescription, other: EnvDescription, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_alike(one, other, "environment 1", "environment 0")
    check_alike(one, replace(one, time_limit=3), "environment 1", "environment 0")


@pytest.mark.parametrize("name", ["groups", "root"])
def test_groups_and_the_root_are_mappings(name: str) -> None:
    parts: dict[str, Any] = {"groups": {}, name: ["state"]}
    with pytest.raises(TypeError, match=f"{name} must be a mapping from names, but is"):
        EnvDescription("a", **parts)
