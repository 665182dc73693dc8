"""Factories of environments that are collected together."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from workloads.counting import CountingEnv

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.factories import check_alike


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
        (
            described(),
            described("ba"),
            r"the agents of g is \['b', 'a'\] in environment",
        ),
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
