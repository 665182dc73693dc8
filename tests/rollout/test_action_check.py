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
from marl_collect.core.description import EnvDescription, GroupDescription, allocate
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


def checker(space: Any, **options: Any) -> tuple[Any, Any]:
    """Return the memory of a group of agents that all act, and the check of it."""
    box = spaces.Box(-1, 1, (1,))
    group = GroupDescription(("a", "b", "c"), box, space, **options)
    description = EnvDescription("test", {"g": group})
    memory = allocate(description.row(), (1,))
    memory["g", "mask"].fill(True)
    return memory, action_check(description, memory)


BOX: Any = spaces.Box(-1, 1, (2,))
ONE_HOT = [1, 0, 0, 0]
WRONG: list[tuple[Any, Any, Any, str]] = [
    (BOX, [0.5, -9], [0, np.nan], r"is \[0.0, nan\], .* expected finite numbers"),
    (BOX, [0.5, -9], [np.inf, 0], r"is \[inf, 0.0\], .* expected finite numbers"),
    (spaces.Discrete(4), 3, 4, "is 4, .* expected an integer from 0 to 3"),
    (spaces.Discrete(4), 0, -1, "is -1, .* expected an integer from 0 to 3"),
    *(
        (spaces.Discrete(4), ONE_HOT, row, "is .* a single 1")
        for row in ([1, 1, 0, 0], [0] * 4, [2, 0, 0, 0], [1, 7, 0, 0], [0, 1, -1, 0])
    ),
]


@pytest.mark.parametrize(("space", "valid", "wrong", "message"), WRONG)
def test_the_error_has_the_action_and_what_is_expected(
    space: Any, valid: Any, wrong: Any, message: str
) -> None:
    memory, check = checker(space, categorical_actions=valid is not ONE_HOT)
    memory["g", "action"][...] = valid
    check(0)
    memory["g", "action"][0, 1] = wrong
    with pytest.raises(PolicyError, match=f"'b' of group 'g' {message}"):
        check(0)
    memory["g", "mask"][0, 1] = False  # Actions of inactive agents are not checked.
    check(0)


SPACES = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2]),
    "MultiDiscrete of a matrix": spaces.MultiDiscrete(np.array([[3, 2], [1, 4]])),
    "MultiBinary": spaces.MultiBinary(2),
    "MultiBinary of a matrix": spaces.MultiBinary([2, 2]),
}


def _largest(space: Any) -> Any:
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec - 1
    return 1


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_integers_are_valid_if_their_space_contains_them(space: Any) -> None:
    memory, check = checker(space)
    random = np.random.default_rng(0)
    valid = 0
    for _ in range(200):
        # Most actions are valid, or have a single number that is not.
        action = np.minimum(random.integers(0, 2, space.shape or ()), _largest(space))
        if random.random() < 0.5:
            action = np.array(action)
            action.flat[random.integers(action.size)] = random.integers(-1, 5)
        memory["g", "action"][0, 1] = action
        if space.contains(np.asarray(action, space.dtype)):
            valid += 1
            check(0)
        else:
            with pytest.raises(PolicyError, match="'b' of group 'g'"):
                check(0)
    assert 0 < valid < 200


def test_every_part_of_a_nested_action_is_checked() -> None:
    move, aim = spaces.Discrete(3), spaces.Tuple([spaces.Box(-1, 1, (2,))])
    memory, check = checker(spaces.Dict({"move": move, "aim": aim}))
    check(0)
    memory["g", "action", "aim", "0"][0, 1, 1] = np.nan
    with pytest.raises(PolicyError, match=r"'b' of group 'g' is \[0.0, nan\]"):
        check(0)
    memory["g", "action", "aim", "0"].fill(0)
    memory["g", "action", "move"][0, 0] = 3
    with pytest.raises(PolicyError, match="'a' of group 'g' is 3"):
        check(0)


def test_an_idle_agent_does_not_hide_the_illegal_action_of_another() -> None:
    memory, check = checker(spaces.Discrete(3), action_mask=True)
    memory["g", "action_mask"][...] = [[True, True, False]]
    memory["g", "mask"][...] = [[False, True, True]]
    memory["g", "action"][...] = [[-1, 0, 1]]
    check(0)
    memory["g", "action"][...] = [[-1, 2, 1]]
    with pytest.raises(PolicyError, match="'b' of group 'g' is 2"):
        check(0)
    memory["g", "action"][...] = [[np.iinfo(np.int64).min, 0, 3]]
    with pytest.raises(PolicyError, match="'c' of group 'g' is 3"):
        check(0)
