"""Flags and masks at the end of an agent and of an episode."""

import numpy as np
import pytest
from gymnasium import spaces

from marl_collect.core.description import (
    EnvDescription,
    GroupDescription,
    Row,
    allocate,
)
from marl_collect.core.flags import Flags

PAIR = EnvDescription(
    name="pair",
    groups={
        "pair": GroupDescription(
            agents=("pair_0", "pair_1"),
            observation=spaces.Box(-5, 5, (2,), np.float32),
            action=spaces.Discrete(3),
            action_mask=True,
        )
    },
)


def running() -> tuple[Row, Flags]:
    row = allocate(PAIR.row())
    flags = Flags(row, PAIR)
    flags.clear()
    row["pair", "mask"].fill(True)
    row["pair", "action_mask"][:] = [True, False, False]
    return row, flags


def test_an_agent_that_revives_may_end_again() -> None:
    row, flags = running()
    flags.end("pair", 0, terminated=True, truncated=False)
    flags.revive("pair", 0)
    assert not flags.settle()
    assert not any(row["pair", flag].any() for flag in ("done", "terminated"))
    flags.end("pair", 0, terminated=False, truncated=True)
    assert row["pair", "truncated"].ravel().tolist() == [True, False]
    assert not row["pair", "terminated"].any()


@pytest.mark.parametrize("ending", ["a time limit of ours", "its agents", "everybody"])
def test_no_agent_acts_after_the_end_of_an_episode(ending: str) -> None:
    row, flags = running()
    if ending == "a time limit of ours":
        flags.truncate()
    elif ending == "everybody":
        flags.end_all(terminated=False, truncated=True)
    else:
        for agent in range(2):
            flags.end("pair", agent, terminated=True, truncated=False)
        assert flags.settle()
    assert row["pair", "done"].all()
    assert not row["pair", "mask"].any()
    assert row["pair", "action_mask"].all()


def test_masks_stay_while_an_agent_is_alive() -> None:
    row, flags = running()
    flags.end("pair", 0, terminated=True, truncated=False)
    assert not flags.settle()
    assert row["pair", "mask"].all()
    assert not row["pair", "action_mask"].all()


def test_truncation_keeps_the_flags_of_agents_that_ended_before() -> None:
    row, flags = running()
    flags.end("pair", 0, terminated=True, truncated=False)
    flags.truncate()
    assert row["pair", "terminated"].ravel().tolist() == [True, False]
    assert row["pair", "truncated"].ravel().tolist() == [False, True]
    assert (bool(row["terminated",][0]), bool(row["truncated",][0])) == (False, True)
