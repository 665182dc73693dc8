"""PettingZoo: how observations, rewards, infos and states are written to rows."""

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns
from workloads.free import FreeEnv
from zoo_tools import NESTED, BoundEnv, nested, scripted

from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env


@pytest.mark.parametrize("reward", [None, "much", [1.0, 2.0]])
def test_a_reward_that_is_not_a_number_is_an_error_that_names_the_agent(
    reward: Any,
) -> None:
    class Odd(ScriptedEnv):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            out = super().step(actions)
            out[1]["agent_1"] = reward
            return out

    env = BoundEnv(PettingZooWrapper(Odd()))
    with pytest.raises(ValueError, match="reward of agent agent_1 must be a number"):
        env.step()


def test_a_reward_of_an_unknown_agent_is_an_error_that_names_it() -> None:
    class Odd(ScriptedEnv):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            out = super().step(actions)
            out[1]["agent_9"] = 0.0
            return out

    env = BoundEnv(PettingZooWrapper(Odd()))
    with pytest.raises(ValueError, match="'agent_9', which is not one of its"):
        env.step()


def test_rewards_may_have_any_order_and_number_type() -> None:
    class Odd(ScriptedEnv):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            observations, rewards, *flags = super().step(actions)
            if self.steps % 2:
                rewards = dict(reversed(rewards.items()))
            kinds = (int, np.float64, np.float32)
            rewards = {
                agent: kind(reward)
                for kind, (agent, reward) in zip(kinds, rewards.items(), strict=True)
            }
            return observations, rewards, *flags

    env = BoundEnv(PettingZooWrapper(Odd()))
    for step in (1, 2):
        env.step()
        rewards = env["agent", "reward"].ravel().tolist()
        assert rewards == [step, 10 + step, 20 + step]


class Sloppy(ScriptedEnv):  # type: ignore[misc]
    """An environment whose results can be changed before it returns them."""

    def __init__(self, spoil: Any) -> None:
        super().__init__(Script(ends={"agent_1": (2, "terminated")}, max_cycles=4))
        self.spoil = spoil

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.now: Any = super().reset(seed=seed)
        self.spoil(self)
        return self.now

    def step(self, actions: Any) -> Any:
        self.now = super().step({a: actions.get(a, 0) for a in self.agents})
        self.spoil(self)
        return self.now


def drop(index: int, step: int) -> Any:
    def spoil(env: Sloppy) -> None:
        if env.steps >= step and len(env.now) > index:
            env.now[index].pop("agent_2", None)

    return spoil


def stay(env: Sloppy) -> None:
    if env.steps in (2, 3):
        env.agents = ["agent_0", "agent_1", "agent_2"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop(0, 0), r"After reset_row.*lists agent_2, but it has no observation"),
        (drop(0, 1), r"Step 1 of .*lists agent_2, but it has no observation"),
        (drop(1, 2), r"Step 2 of .*lists agent_2, but it has no reward"),
        (drop(2, 3), r"Step 3 of .*lists agent_2, but it has no termination"),
        (stay, r"Step 2 of .*agent_1 is done, but env.agents still lists it"),
    ],
)
def test_check_env_finds_results_without_an_agent(spoil: Any, message: str) -> None:
    def factory() -> PettingZooWrapper:
        return PettingZooWrapper(Sloppy(spoil), done_on_any=False)

    with pytest.raises(ContractError) as excinfo:
        check_env(factory, episodes=2)
    assert any(re.search(message, finding) for finding in excinfo.value.findings)
    assert len(excinfo.value.findings) <= 3, "a finding is repeated for every step"


@pytest.mark.parametrize(
    "observe",
    [
        lambda i, step, action: [float(i), 0.5, 2],
        lambda i, step, action: np.array([i, 0.5, 2], dtype=np.float64),
        lambda i, step, action: (np.float64(i), 0.5, np.int64(2)),
    ],
)
def test_lists_and_float64_are_cast_to_the_space(observe: Any) -> None:
    env = scripted(Script(observe=observe))
    assert env["agent", "observation"].dtype == np.float32
    assert env["agent", "observation"].tolist() == [
        [0, 0.5, 2],
        [1, 0.5, 2],
        [2, 0.5, 2],
    ]


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(4), r"observation of agent agent_0 .*\(3,\).*\(4,\)"),
        (np.zeros(1), r"\(3,\).*\(1,\)"),
        ([[0.0], [1.0, 2.0]], "must be an array of numbers"),
        ("text", "must be an array of numbers of shape .*'text'"),
        ({"a": 1}, r"a dict with the keys \['a'\]"),
    ],
)
def test_a_wrong_observation_is_an_error_that_names_the_agent(
    observation: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scripted(Script(observe=lambda i, step, action: observation))


def test_fractions_in_an_integer_space_are_an_error() -> None:
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    script = Script(observation=image, observe=lambda i, s, a: np.full((2, 2), 0.5))
    with pytest.raises(ValueError, match=r"agent_0 must fit the dtype uint8.*float64"):
        scripted(script)


def test_whole_numbers_in_an_integer_space_are_cast() -> None:
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    script = Script(observation=image, observe=lambda i, s, a: np.full((2, 2), 200))
    env = scripted(script)
    env.step()
    assert env["agent", "observation"].dtype == np.uint8
    assert (env["agent", "observation"] == 200).all()


@pytest.mark.parametrize("first", [5, 200])
def test_integers_that_overflow_their_dtype_are_an_error(first: int) -> None:
    small = spaces.Box(-100, 100, (3,), np.int8)

    def observe(i: int, step: int, action: Any) -> Any:
        return np.full(3, 200 if step else first, dtype=np.int64)

    with pytest.raises(ValueError, match=r"agent_0 .*int8 .*value 200 of dtype int64"):
        scripted(Script(observation=small, observe=observe)).step()


def test_nested_observations_have_nested_keys() -> None:
    env = scripted(Script(observation=NESTED, observe=nested), agent_ids=True)
    env.step()
    observed = {
        key[2:]: a for key, a in env.row.items() if key[1:2] == ("observation",)
    }
    assert observed["image",].shape == (3, 2, 2, 3)
    assert observed["image",].dtype == np.uint8
    assert observed["inner", "level"].tolist() == [0, 1, 2]
    assert observed["pair", "0"].tolist() == [[1], [1], [1]]
    assert observed["pair", "1"].tolist() == [[0, 1]] * 3
    assert (observed["agent_id",] == np.eye(3)).all()


def test_a_missing_entry_of_an_observation_is_an_error_that_names_it() -> None:
    script = Script(
        observation=NESTED,
        observe=lambda i, s, a: {
            k: v for k, v in nested(i, s, a).items() if k != "pair"
        },
    )
    with pytest.raises(ValueError, match="agent_0 must have the entry 'pair'"):
        scripted(script)


def test_agent_ids_of_an_image_are_an_error() -> None:
    script = Script(observation=spaces.Box(0, 255, (2, 2), np.uint8))
    with pytest.raises(ValueError, match="agent_ids"):
        scripted(script, agent_ids=True)


def test_the_shape_of_an_info_may_be_given() -> None:
    script = Script(info=lambda i, step: {"pair": [step, i]} if step else {})
    env = scripted(script, info_keys={"pair": (2,)})
    env.step()
    assert env["agent", "info", "pair"].tolist() == [[1, 0], [1, 1], [1, 2]]


def test_an_info_that_is_not_a_number_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="'text' of agent agent_0.*'hello'"):
        scripted(Script(info=lambda i, s: {"text": "hello"}), info_keys=["text"])


def test_return_state_without_a_state_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs an environment with state\(\)"):
        PettingZooWrapper(FreeEnv(), return_state=True)


BOX = spaces.Box(0, 1, (2,))


@pytest.mark.parametrize("space", [spaces.Dict({"a": BOX}), spaces.Tuple([BOX]), None])
@pytest.mark.parametrize("env", [ScriptedEnv, ScriptedTurns])
def test_a_state_of_several_arrays_is_an_error_with_advice(
    space: Any, env: Any
) -> None:
    raw = env()
    raw.state = lambda: {"a": np.zeros(2)}
    if space is not None:
        raw.state_space = space
    problem = r"state\(\) returned \{'a'" if space is None else "state_space is"
    with pytest.raises(TypeError, match=rf"single array .*{problem}.*flatten_space"):
        PettingZooWrapper(raw, return_state=True)


def test_a_space_without_arrays_is_an_error_that_names_the_key() -> None:
    with pytest.raises(TypeError, match="observation has the space Text"):
        scripted(Script(observation=spaces.Text(4)))
