"""``AgentLists``: environments that use lists of agents."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

import torch
from support.zoo import Countdown, Script, ScriptedEnv
from workloads.counting import CountingEnv
from zoo_tools import BoundEnv

from marl_collect import Collector, check_env
from marl_collect.envs import AgentLists, FrameStack, PettingZooWrapper
from marl_collect.models import ImageInput, make_policy


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
    lists = AgentLists(Countdown(cut=cut))
    lists.reset()
    for _ in range(2):
        lists.step({})
    assert [[*part] for part in lists.step({})] == 5 * [["agent_1", "agent_2"]]


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
        ({"action_space": spaces.Discrete(3)}, None, TypeError, "of spaces.*Discrete"),
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
        ("step", ([np.zeros(2)] * 3, [0] * 4, False, False, {}), ", but returned 4"),
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


def counting(**options: Any) -> CountingEnv:
    return CountingEnv(min_length=4, max_length=9, **options)


@pytest.mark.parametrize(
    "options", [{}, {"mask": False}, {"deaths": False}, {"image": (5, 4, 3)}], ids=str
)
def test_stacked_environments_fulfil_the_contract(options: dict[str, Any]) -> None:
    check_env(lambda: FrameStack(counting(**options), 3))
    check_env(lambda: FrameStack(FrameStack(counting(**options), 2), 1))


@pytest.mark.processes
def test_stacked_pictures_are_read_by_convolutions() -> None:
    make_env = lambda: FrameStack(counting(image=(32, 30, 3)), 4)  # noqa: E731
    policy = make_policy(make_env)
    weights = [w for w in policy.state_dict().values() if w.ndim >= 4]
    assert weights[0].shape[-3] == 4 * 3
    with Collector(make_env, policy, frames_per_batch=20, total_frames=20) as collector:
        batch = collector.next()
        expected = policy(batch.clone())
    pictures = batch["hunter", "observation", "image"]
    assert pictures.shape == (1, 20, 2, 4, 32, 30, 3)
    torch.testing.assert_close(
        expected["hunter", "logits"], batch["hunter", "logits"], rtol=1e-4, atol=1e-5
    )
    joined = ImageInput(stacked=True)(pictures)
    assert joined.shape == (1, 20, 2, 12, 32, 30)
    second = pictures[..., 1, :, :, 2].float() / 255
    torch.testing.assert_close(joined[..., 5, :, :], second)


def test_an_empty_observation_is_stacked_too() -> None:
    boxes: Any = {"full": spaces.Box(0, 9, (2,)), "empty": spaces.Box(0, 9, (0,))}
    seen = {name: np.zeros(box.shape, np.float32) for name, box in boxes.items()}
    script = Script(observation=spaces.Dict(boxes), observe=lambda *_: seen)
    data = FrameStack(PettingZooWrapper(ScriptedEnv(script)), 3).rollout(4)
    assert data["agent", "observation", "empty"].shape == (4, 3, 3, 0)
    assert data["agent", "observation", "full"].shape == (4, 3, 3, 2)


def test_a_stack_needs_a_frame() -> None:
    with pytest.raises(ValueError, match="an integer of at least 1, but is 0"):
        FrameStack(counting(), 0)
    with pytest.raises(TypeError, match="frames must be an integer of .*is '3'"):
        FrameStack(counting(), "3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="FrameStack wraps an environment"):
        FrameStack(CountingEnv)  # type: ignore[arg-type]
