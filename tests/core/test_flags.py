"""Flags and masks at the end of an agent and of an episode."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marl_collect.core.description import (
    FLAGS,
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


DONE_ON_ANY = replace(PAIR, done_on_any=True)
ENDS = [
    (None, None),
    ("terminated", None),
    ("truncated", None),
    ("terminated", "truncated"),
    ("terminated", "terminated"),
    ("truncated", "truncated"),
    ("both", None),
    ("both", "terminated"),
]
BOTH_WAYS = pytest.mark.parametrize("worlds", [False, True], ids=["one", "worlds"])


def ended(description: EnvDescription, ends: Any, *, worlds: bool) -> Row:
    """Return the row after a step in which agents ended, alone or as a world."""
    row = allocate(description.row(), (1,) if worlds else ())
    terminated = [end in ("terminated", "both") for end in ends]
    truncated = [end in ("truncated", "both") for end in ends]
    for key, fill in (("mask", True), ("action_mask", False)):
        row["pair", key].fill(fill)
    flags = Flags(row, description)
    flags.clear()
    if worlds:
        arrays = ([np.array(f).reshape(1, 2, 1)] for f in (terminated, truncated))
        flags.end_worlds(*arrays)
        return {key: array[0] for key, array in row.items()}
    for agent, end in enumerate(zip(terminated, truncated, strict=True)):
        if any(end):
            flags.end("pair", agent, terminated=end[0], truncated=end[1])
    flags.settle()
    return row


@BOTH_WAYS
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("description", [PAIR, DONE_ON_ANY], ids=["all", "any"])
def test_the_roots_flags_follow_from_the_agents(
    description: EnvDescription, ends: Any, *, worlds: bool
) -> None:
    row = ended(description, ends, worlds=worlds)
    terminated = [end in ("terminated", "both") for end in ends]
    truncated = [end in ("truncated", "both") for end in ends]
    done = [end is not None for end in ends]
    if description.done_on_any:
        expected = [any(done), any(terminated), any(truncated)]
    else:
        expected = [all(done), all(terminated), all(done) and not all(terminated)]
    assert [bool(row[flag,][0]) for flag in FLAGS] == expected
    over = expected[0]
    assert row["pair", "terminated"].ravel().tolist() == terminated
    assert row["pair", "done"].ravel().tolist() == [d or over for d in done]
    cut = [t or (over and not d) for t, d in zip(truncated, done, strict=True)]
    assert row["pair", "truncated"].ravel().tolist() == cut


@pytest.mark.parametrize("description", [PAIR, DONE_ON_ANY], ids=["all", "any"])
def test_all_actions_of_agents_that_ended_in_a_world_are_legal(
    description: EnvDescription,
) -> None:
    row = ended(description, ("terminated", None), worlds=True)
    over = description.done_on_any
    assert row["pair", "mask"].tolist() == [False, not over]
    assert row["pair", "action_mask"].tolist() == [[True] * 3, [over] * 3]


def test_truncation_keeps_the_flags_of_agents_that_ended_before() -> None:
    row, flags = running()
    flags.end("pair", 0, terminated=True, truncated=False)
    flags.truncate()
    assert row["pair", "terminated"].ravel().tolist() == [True, False]
    assert row["pair", "truncated"].ravel().tolist() == [False, True]
    assert (bool(row["terminated",][0]), bool(row["truncated",][0])) == (False, True)
