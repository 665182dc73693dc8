"""What a policy may not do to its input and outputs, and what it is probed on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.counting import CountingEnv, Fault

from marl_collect import Collector
from marl_collect.errors import PolicyError

OBSERVATION, ACTION = ("hunter", "observation"), ("hunter", "action")
LENGTH, FRAMES = 5, 12
Act = Callable[[TensorDictBase], Any]


def counting() -> CountingEnv:
    return CountingEnv(n_prey=0, deaths=False, min_length=LENGTH, max_length=LENGTH)


def acts(td: TensorDictBase) -> TensorDictBase:
    td[ACTION] = (td[OBSERVATION][..., 0] > 0.5).long()
    return td


def overwrites(td: TensorDictBase) -> TensorDictBase:
    td[OBSERVATION] = td[OBSERVATION] / 10
    return acts(td)


def begins_late(change: Callable[[TensorDictBase], Any], *, clones: bool) -> Act:
    calls = [0]

    def act(td: TensorDictBase) -> TensorDictBase:
        calls[0] += 1
        td = acts(td.clone() if clones else td)
        if calls[0] > 6:
            change(td)
        return td

    return act


CHANGED = "input hunter/observation"
LATE: dict[str, tuple[Callable[[TensorDictBase], Any], str]] = {
    "set": (lambda td: td.set(OBSERVATION, td[OBSERVATION] / 2), CHANGED),
    "in_place": (lambda td: td[OBSERVATION].div_(2), CHANGED),
    "pop": (lambda td: td.pop(OBSERVATION), CHANGED),
    "shape": (
        lambda td: td.set(ACTION, td[ACTION][..., None]),
        "hunter/action of shape",
    ),
    "missing": (lambda td: td.pop(ACTION), "did not write hunter/action"),
    "flag in a clone": (
        lambda td: td["done"].logical_not_(),
        "changed its input done",
    ),
}


@pytest.mark.parametrize("late", LATE)
def test_changes_that_begin_later_are_noticed(late: str) -> None:
    change, message = LATE[late]
    policy = begins_late(change, clones="clone" in late)
    collector = Collector(counting, policy, frames_per_batch=FRAMES)
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
        td[key] = value
        return acts(td)

    with pytest.raises((TypeError, ValueError), match=message):
        Collector(counting, act, frames_per_batch=FRAMES)


def test_an_error_of_the_policy_says_what_it_was_called_on() -> None:
    network = nn.Linear(7, 4)
    policy = TensorDictModule(network, [("hunter", "observation")], [("hunter", "x")])
    with pytest.raises(RuntimeError, match="cannot be multiplied") as excinfo:
        Collector(CountingEnv, policy, frames_per_batch=FRAMES)
    (note,) = excinfo.value.__notes__
    assert note.startswith("The policy was called on observations of counting, ")
    assert note.endswith(" in a group: hunter/observation [1, 2, 5].")


def test_the_policy_is_probed_on_the_observations_of_the_first_reset() -> None:
    resets: list[int] = []

    def act(td: TensorDictBase) -> TensorDictBase:
        if not td[OBSERVATION].any():
            raise ZeroDivisionError("no environment shows zeros")
        return acts(td)

    def make() -> CountingEnv:
        note = Fault(lambda: resets.append(1), "reset", repeat=True)
        return CountingEnv(fault=note, min_length=LENGTH, max_length=LENGTH, n_prey=0)

    with Collector(make, act, frames_per_batch=LENGTH) as collector:
        assert len(resets) == 1
        collector.next()
        assert len(resets) == 2  # The second episode has begun.


def test_the_input_of_a_policy_that_does_not_change_it_is_created_once() -> None:
    inputs = []

    def act(td: TensorDictBase) -> TensorDictBase:
        inputs.append(id(td))
        return acts(td)

    with Collector(counting, act, frames_per_batch=FRAMES) as collector:
        assert "copies" not in collector.explain()[0]
        inputs.clear()
        collector.next()
    assert len(set(inputs)) == 1
    with Collector(counting, overwrites, frames_per_batch=FRAMES) as collector:
        assert "copies" in collector.explain()[0]
