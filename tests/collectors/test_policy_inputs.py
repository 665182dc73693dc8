"""What a policy does to its input changes neither what it sees nor what is stored.

Every collector is compared with a loop that builds a TensorDict for each frame.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.errors import PolicyError

OBSERVATION, ACTION = ("a", "observation"), ("a", "action")
LENGTH, AGENTS, FRAMES = 5, 2, 12
Act = Callable[[TensorDictBase], Any]


class Clock(MultiAgentEnv):
    """Shows each agent the time, which no action changes; one row is written once."""

    resets = 0

    def __init__(self) -> None:
        box: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        group = GroupDescription(("a_0", "a_1"), box, box)
        self._what = EnvDescription("clock", {"a": group})

    @property
    def description(self) -> EnvDescription:
        return self._what

    def bind(self, row: Row) -> None:
        self._row = row
        self._flags = Flags(row, self._what)

    def reset_row(self, seed: int) -> None:
        self.resets += 1
        self._time = 0
        self._flags.clear()
        self._row["a", "mask"].fill(True)
        self._row[OBSERVATION][1] = 3  # Not written again before the next episode.
        self._show()

    def step_row(self) -> None:
        self._time += 1
        self._row["a", "reward"].fill(1)
        self._show()
        if self._time == LENGTH:
            self._flags.end_all(terminated=True, truncated=False)

    def _show(self) -> None:
        self._row[OBSERVATION][0] = (self._time, self._time**2 + 1)

    def render(self) -> None:
        return None

    def close(self) -> None:
        self._closed = True


def overwrites(td: TensorDictBase) -> TensorDictBase:
    td[OBSERVATION] = td[OBSERVATION] / 10
    td[ACTION] = td[OBSERVATION] + 1
    return td


def begins_late(change: Callable[[TensorDictBase], Any]) -> Act:
    calls = [0]

    def act(td: TensorDictBase) -> TensorDictBase:
        calls[0] += 1
        td[ACTION] = td[OBSERVATION] + 1
        if calls[0] > 6:
            change(td)
        return td

    return act


LATE: dict[str, tuple[Callable[[TensorDictBase], Any], str]] = {
    "set": (lambda td: td.set(OBSERVATION, td[OBSERVATION] / 2), "input a/observation"),
    "in_place": (lambda td: td[OBSERVATION].div_(2), "input a/observation"),
    "pop": (lambda td: td.pop(OBSERVATION), "input a/observation"),
    "shape": (lambda td: td.set(ACTION, td[ACTION][..., :1]), "a/action of shape"),
    "missing": (lambda td: td.pop(ACTION), "did not write a/action"),
}


@pytest.mark.parametrize("late", LATE)
def test_changes_that_begin_later_are_noticed(late: str) -> None:
    change, message = LATE[late]
    collector = Collector([Clock], begins_late(change), frames_per_batch=FRAMES)
    with collector, pytest.raises(PolicyError, match=message):
        collector.next()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step_count", torch.ones(1, 1), "writes step_count"),
        (("collector", "mask"), torch.ones(1, 1), "writes collector/mask"),
        ("done", torch.ones(1, 1, dtype=torch.bool), "changes done"),
        ("brief", torch.ones(1, 1, dtype=torch.bfloat16), "torch.bfloat16"),
    ],
)
def test_outputs_that_cannot_be_stored_are_refused_at_the_start(
    key: Any, value: torch.Tensor, message: str
) -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        td[ACTION] = td[OBSERVATION] + 1
        td[key] = value
        return td

    with pytest.raises((TypeError, ValueError), match=message):
        Collector([Clock], act, frames_per_batch=FRAMES)


def test_an_error_of_the_policy_says_what_it_was_called_on() -> None:
    network = nn.Linear(7, 4)
    policy = TensorDictModule(network, [("hunter", "observation")], [("hunter", "x")])
    with pytest.raises(RuntimeError, match="cannot be multiplied") as excinfo:
        Collector(CountingEnv, policy, frames_per_batch=FRAMES)
    (note,) = excinfo.value.__notes__
    assert note.startswith("The policy was called on observations of counting, ")
    assert note.endswith(" in a group: hunter/observation [1, 2, 5].")


def test_the_policy_is_probed_on_the_observations_of_the_first_reset() -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        norm = td[OBSERVATION].norm()
        if not norm > 0:
            raise ZeroDivisionError("no environment shows zeros")
        td[ACTION] = td[OBSERVATION] / norm
        return td

    with Collector([Clock], act, frames_per_batch=LENGTH) as collector:
        assert collector.getattr_env("resets") == [1]
        collector.next()
        # The second episode has begun.
        assert collector.getattr_env("resets") == [2]


def test_the_input_of_a_policy_that_does_not_change_it_is_created_once() -> None:
    inputs = []

    def act(td: TensorDictBase) -> TensorDictBase:
        inputs.append(id(td))
        td[ACTION] = td[OBSERVATION] + 1
        return td

    with Collector([Clock], act, frames_per_batch=FRAMES) as collector:
        assert "copies" not in collector.explain()[0]
        inputs.clear()
        collector.next()
    assert len(set(inputs)) == 1
    with Collector([Clock], overwrites, frames_per_batch=FRAMES) as collector:
        assert "copies" in collector.explain()[0]
