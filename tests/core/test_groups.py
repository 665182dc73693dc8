"""Agents are grouped by the names that they have before a number."""

import pytest

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
