"""``check_actions``: an invalid action is an error that names the agent."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from marl_collect.core.action_check import action_check
from marl_collect.core.description import (
    EnvDescription,
    GroupDescription,
    allocate,
    leaf_spaces,
)
from marl_collect.errors import PolicyError, WorkerError
from marl_collect.models import make_policy

KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector]
masked = partial(CountingEnv, action_mask=True, deaths=False)


class Acts:
    """Takes a given action from its sixth frame on, and valid actions before."""

    def __init__(self, group: str, agent: int, action: Any) -> None:
        self.where = group, agent
        self.action = action
        self.calls = 0

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        n = td.batch_size[0]
        mask = td.get(("hunter", "action_mask"))
        td.set(("hunter", "action"), mask.int().argmax(-1))
        td.set(("prey", "action"), torch.zeros(n, 3, 2))
        self.calls += 1
        if self.calls > 5:
            group, agent = self.where
            action = self.action(td) if callable(self.action) else self.action
            td.get((group, "action"))[:, agent] = action
        return td


def illegal(td: TensorDictBase) -> torch.Tensor:
    """Return the first illegal action of hunter 1."""
    return td.get(("hunter", "action_mask"))[:, 1].int().argmin(-1)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [*KINDS, ParallelEnv])
def test_an_invalid_action_names_group_agent_and_frame(kind: Any) -> None:
    options: Any = {"check_actions": True, "trust_policy": True, "frames_per_batch": 40}
    policy = Acts("hunter", 1, illegal)
    if kind is ParallelEnv:
        parallel = partial(ParallelEnv, 2, masked, groups=2)
        collector: Any = Collector(parallel, policy, **options)
    else:
        collector = kind([masked] * 2, policy, **options)
    assert collector.explain()[0].endswith("Actions are checked in every frame.")
    message = "'hunter_1' of group 'hunter' .*in frame .* legal"
    with pytest.raises(PolicyError, match=message) as excinfo:  # noqa: PT012
        for _ in range(3):
            collector.next()
    if kind in KINDS[1:]:
        cause = excinfo.value.__cause__
        assert isinstance(cause, WorkerError)
        assert cause.phase == "policy"


@pytest.mark.parametrize("categorical", [True, False])
def test_actions_of_a_recorded_policy_are_checked(categorical: bool) -> None:
    factory = partial(CountingEnv, categorical_actions=categorical)
    policy = make_policy(factory(), num_cells=(4,))
    with Collector(
        factory, policy, frames_per_batch=20, check_actions=True
    ) as collector:
        collector.next()
        with torch.no_grad():
            for parameter in policy["prey"].parameters():
                parameter.fill_(float("nan"))
        with pytest.raises(PolicyError, match="of group 'prey'"):
            collector.next()


NESTED = spaces.Dict(
    {"aim": spaces.Tuple([spaces.Box(-1, 1, (2,))]), "move": spaces.Discrete(3)}
)
KINDS_OF_ACTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Box": (spaces.Box(-1, 1, (2,)), {}),
    "Discrete": (spaces.Discrete(4), {}),
    "masked": (spaces.Discrete(3), {"action_mask": True}),
    "one-hot": (spaces.Discrete(4), {"categorical_actions": False}),
    "masked one-hot": (
        spaces.Discrete(3),
        {"categorical_actions": False, "action_mask": True},
    ),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 2]), {}),
    "matrix": (spaces.MultiDiscrete(np.array([[3, 2], [1, 4]])), {}),
    "MultiBinary": (spaces.MultiBinary(2), {}),
    "matrix of bits": (spaces.MultiBinary([2, 2]), {}),
    "nested": (NESTED, {}),
}
WORDS = {
    spaces.Box: "finite numbers",
    spaces.Discrete: "an integer from 0 to ",
    spaces.MultiDiscrete: "integers from 0, below [",
    spaces.MultiBinary: "integers from 0, below 2",
}
WRONG_INTEGERS = (-1, 4, np.iinfo(np.int64).min, np.iinfo(np.int64).max)


def drawn(random: np.random.Generator, space: Any, *, one_hot: bool) -> Any:
    """Return an action, in which a number may be wrong; and whether it is valid."""
    harmed = random.random() < 0.1
    if one_hot:
        row = np.eye(space.n, dtype=np.int64)[random.integers(space.n)]
        if harmed:
            row[random.integers(space.n)] += random.choice([-1, 1, 6])
        return row, sorted(row) == [0] * (space.n - 1) + [1]
    if isinstance(space, spaces.Box):
        numbers = random.uniform(-9, 9, space.shape).astype(np.float32)
        if harmed:
            wrong = random.choice([np.nan, np.inf, -np.inf])
            numbers[random.integers(len(numbers))] = wrong
        return numbers, not harmed
    action = np.array(space.sample(), np.int64)
    if harmed:
        action.flat[random.integers(action.size)] = random.choice(WRONG_INTEGERS)
    return action, not harmed


@pytest.mark.parametrize("place", range(len(KINDS_OF_ACTIONS)))
def test_the_first_wrong_action_of_an_agent_that_acts_is_named(place: int) -> None:
    """In two environments with two groups, whose actions are of two kinds."""
    random, (*kinds,) = np.random.default_rng(place), KINDS_OF_ACTIONS.values()
    box = spaces.Box(-1, 1, (1,))
    groups = {
        name: GroupDescription(agents, box, space, **options)
        for name, agents, (space, options) in (
            ("g", ("a", "b", "c"), kinds[place]),
            ("h", ("d", "e"), kinds[place - 1]),
        )
    }
    description = EnvDescription("test", groups)
    memory: Any = allocate(description.row(), (2,))
    check = action_check(description, memory)
    outcomes = set()
    for frame in range(300):
        wrong = []
        for name, group in groups.items():
            acts = random.random((2, group.n_agents)) < 0.8
            memory[name, "mask"][...] = acts
            if group.action_mask:
                legal = random.random((2, group.n_agents, group.n_actions)) < 0.9
                memory[name, "action_mask"][...] = legal
            for key, space in leaf_spaces(group.action, (name, "action")):
                for k, i in np.ndindex(acts.shape):
                    action, valid = drawn(random, space, one_hot=group.one_hot)
                    memory[key][k, i] = action
                    if group.action_mask and valid:
                        number = action.argmax() if group.one_hot else action
                        valid = legal[k, i, number]
                    if acts[k, i] and not valid:
                        words = "a single 1" if group.one_hot else WORDS[type(space)]
                        agent = group.agents[i]
                        taken = (
                            f"agent {agent!r} of group {name!r} is {action.tolist()}"
                        )
                        where = f"in frame {frame} of the batch (environment {k} of"
                        legally = ", legal" if group.action_mask else ""
                        wrong.append((f"{taken}, {where}", words, legally))
        outcomes.add(bool(wrong))
        if not wrong:
            check(frame)
            continue
        with pytest.raises(PolicyError) as raised:
            check(frame)
        text, (place_of_first, words, legally) = str(raised.value), wrong[0]
        assert place_of_first in text
        assert words in text.partition(": expected ")[2]
        assert text.endswith(f"{legally}.")
    assert outcomes == {False, True}
