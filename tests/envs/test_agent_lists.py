"""``AgentLists``: environments that use lists of agents."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from support.zoo import Countdown
from zoo_tools import BoundEnv

from marl_collect import check_env
from marl_collect.envs import AgentLists, PettingZooWrapper


@pytest.mark.parametrize("single", [True, False])
def test_check_env(*, single: bool) -> None:
    for keywords in ({}, {"done_on_any": False}, {"info_keys": ["level"]}):
        check_env(
            lambda k=keywords: PettingZooWrapper(  # type: ignore[misc]
                AgentLists(Countdown(alone=not single, single=single)), **k
            ),
            episodes=2,
        )


@pytest.mark.parametrize("cut", [False, True])
def test_agents_that_are_done_leave_and_get_the_first_action(*, cut: bool) -> None:
    raw = Countdown(cut=cut)
    env = BoundEnv(PettingZooWrapper(AgentLists(raw), done_on_any=False))
    for _ in range(2):
        env.step(agent=2)
    assert raw.taken == [3, 3, 3]  # the space begins with 1
    assert env["agent", "mask"].tolist() == [False, True, True]
    assert env["agent", "reward"].ravel().tolist() == [0, 1, 2]
    env.step(agent=2)
    assert raw.taken == [1, 3, 3]
    assert not env["agent", "observation"][0].any()
    assert env.flags("agent")[1 + cut] == [True, True, False]
    env.step(agent=2)
    assert env.flags() == [[True], [not cut], [cut]]


class Strict:
    """Accepts legal actions only; agent 0 ends before agent 1. It has no ``close``."""

    def __init__(self, space: Any, kind: Any) -> None:
        self.action_space = kind([space] * 2)
        self.observation_space = [spaces.Box(-1, 1, (1,), np.float32)] * 2

    def reset(self, seed: int | None = None) -> Any:
        del seed
        self.steps = 0
        return [np.zeros(1, np.float32)] * 2, {}

    def step(self, actions: Any) -> Any:
        whole = spaces.Tuple(self.action_space)
        if not isinstance(self.action_space, list):
            assert type(actions) is type(whole.sample())
        for action, space in zip(actions, whole, strict=True):
            assert space.contains(action), action
        self.steps += 1
        ends = [self.steps >= 2, self.steps >= 4]
        return [np.zeros(1, np.float32)] * 2, [1.0, 1.0], ends, False, {}


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 3], start=[1, 1]),
        spaces.MultiBinary(2),
        spaces.Box(1, 2, (1,), np.float32),
        spaces.Box(-5, -3, (2,), np.int8),
        spaces.Dict(a=spaces.Discrete(2, start=3), b=spaces.Box(1, 2, (1,))),
        spaces.Tuple([spaces.Discrete(2, start=3), spaces.Box(1, 2, (1,))]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [list, tuple, spaces.Tuple])
def test_agents_that_are_done_get_a_legal_action(space: Any, kind: Any) -> None:
    with PettingZooWrapper(AgentLists(Strict(space, kind)), done_on_any=False) as env:
        assert len(env.rollout(9)) == 4


def test_a_single_value_holds_for_all_agents() -> None:
    raw = Countdown(alone=False, single=True)
    env = BoundEnv(PettingZooWrapper(AgentLists(raw), info_keys={"level": ()}))
    env.step()
    assert env["agent", "reward"].ravel().tolist() == [1.5] * 3
    assert env["agent", "info", "level"].tolist() == [1] * 3


def test_agents_have_names() -> None:
    lists = AgentLists(Countdown(2), ["red_0", "blue_0"])
    env = PettingZooWrapper(lists)
    assert env.group_map == {"red": ["red_0"], "blue": ["blue_0"]}
    assert env.description.name == "Countdown"


@pytest.mark.parametrize(
    ("changes", "agents", "error", "message"),
    [
        (
            {"action_space": spaces.Discrete(3)},
            None,
            TypeError,
            "list of spaces.*Discrete",
        ),
        ({"observation_space": None}, None, TypeError, "an observation_space that is"),
        ({}, ["one"], ValueError, "1 agents, 3 observation spaces and 3 action spaces"),
    ],
)
def test_spaces_that_are_no_lists_are_errors(
    changes: dict[str, Any], agents: Any, error: type[Exception], message: str
) -> None:
    raw = Countdown()
    vars(raw).update(changes)
    with pytest.raises(error, match=message):
        AgentLists(raw, agents)


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("reset", [np.zeros(2)] * 3, r"reset\(\) must return a tuple of observations"),
        ("step", ([np.zeros(2)] * 3, [0] * 3, [False] * 3, {}), "but returned 4 value"),
        ("step", ([np.zeros(2)] * 2, 0, False, False, {}), "3 agents, but returned 2"),
        (
            "step",
            ([np.zeros(2)] * 3, [0] * 4, False, False, {}),
            "agents, but returned 4",
        ),
        ("step", ({}, 0, False, False, {}), "must return a list of observations"),
    ],
)
def test_wrong_results_are_errors(method: str, returned: Any, message: str) -> None:
    raw = Countdown()
    env = AgentLists(raw)
    env.reset(seed=0)
    setattr(raw, method, lambda *_args, **_keywords: returned)
    with pytest.raises((TypeError, ValueError), match=message):
        env.reset() if method == "reset" else env.step({})
