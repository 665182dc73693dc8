"""PettingZoo: how results are written to rows, and actions read from them."""

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns, altered
from zoo_tools import BoundEnv, scripted

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

torch = pytest.importorskip("torch")

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
RAW = pytest.mark.parametrize("raw", [ScriptedEnv, ScriptedTurns])


def wrapped(raw: Any, script: Script | None = None, **keywords: Any) -> BoundEnv:
    return BoundEnv(PettingZooWrapper(raw(script), group_map=IN_ONE, **keywords))


def stepped(change: Any) -> BoundEnv:
    """Return an environment after a step whose results are changed."""
    env = BoundEnv(PettingZooWrapper(altered(ScriptedEnv(), step=change)))
    env.step()
    return env


@pytest.mark.parametrize("reverse", [True, False])
def test_rewards_may_have_any_order_and_number_type(reverse: bool) -> None:
    def change(results: Any) -> Any:
        kinds = (int, np.float64, np.int8) if reverse else (np.array, float, np.float16)
        pairs = [*zip(kinds, results[1].items(), strict=True)][:: -1 if reverse else 1]
        rewards = {agent: kind(reward) for kind, (agent, reward) in pairs}
        return results[0], rewards, *results[2:]

    assert stepped(change)["agent", "reward"].ravel().tolist() == [1, 11, 21]


class Sloppy(ScriptedEnv):  # type: ignore[misc]
    """Accepts actions of any agents, and has results that can be changed."""

    def __init__(self, spoil: Any) -> None:
        super().__init__(Script(ends={"agent_1": (2, "terminated")}, max_cycles=4))
        altered(self, reset=lambda r: spoil(self, r), step=lambda r: spoil(self, r))

    def step(self, actions: Any) -> Any:
        return super().step({a: actions.get(a, 0) for a in self.agents})


def drop(index: int, step: int) -> Any:
    def spoil(env: Sloppy, results: Any) -> None:
        if env.steps >= step and len(results) > index:
            results[index].pop("agent_2", None)

    return spoil


def stay(env: Sloppy, _: Any) -> None:
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
    "make",
    [list, tuple, np.float64, torch.tensor, lambda row: (np.float64(row[0]), *row[1:])],
)
def test_lists_tensors_and_float64_are_cast_to_the_space(make: Any) -> None:
    env = scripted(Script(observe=lambda i, s, a: make([i, s + 0.5, 2])))
    env.step()
    observed = env["agent", "observation"]
    assert observed.dtype == np.float32
    assert observed.tolist() == [[0, 1.5, 2], [1, 1.5, 2], [2, 1.5, 2]]


@pytest.mark.parametrize("kind", [None, np.uint8, ">f4"])
def test_numbers_are_cast_to_the_dtype_of_their_space(kind: Any) -> None:
    dtype = np.dtype(kind or np.float32)
    space = spaces.Box(0, 255, (3,), dtype)
    env = scripted(
        Script(observation=space, observe=lambda i, s, a: np.array([i, 200, s]))
    )
    env.step()
    assert env["agent", "observation"].tolist() == [[i, 200, 1] for i in range(3)]
    expected = torch.uint8 if kind is np.uint8 else torch.float32
    assert torch.from_numpy(env["agent", "observation"]).dtype == expected


@RAW
def test_observations_that_are_reused_are_copied(raw: Any) -> None:
    buffer = np.zeros(3, np.float32)

    def observe(i: int, step: int, action: Any) -> Any:
        buffer[:] = [i, step, 0]
        return buffer

    env = wrapped(raw, Script(observe=observe))
    if raw is ScriptedEnv:  # all agents get the same array
        assert (env["agents", "observation"] == [2, 0, 0]).all()
        return
    env.step()
    env.step()
    assert env["agents", "observation"].tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 0]]


def test_the_shape_of_an_info_may_be_given() -> None:
    script = Script(info=lambda i, step: {"pair": [step, i]} if step else {})
    env = scripted(script, info_keys={"pair": (2,)})
    env.step()
    assert env["agent", "info", "pair"].tolist() == [[1, 0], [1, 1], [1, 2]]


@RAW
def test_infos_may_be_none(raw: Any) -> None:
    script = Script(info=lambda i, s: None)  # type: ignore[arg-type, return-value]
    env = wrapped(raw, script, info_keys=["speed"])
    env.step()
    assert not env["agents", "info", "speed"].any()
    check_env(lambda: PettingZooWrapper(raw(script), info_keys=["speed"]))


@RAW
@pytest.mark.parametrize(
    "dtype", [np.uint8, np.bool_, np.int16, np.uint64, np.float16, np.float64]
)
def test_a_state_without_space_may_have_any_dtype(raw: Any, dtype: Any) -> None:
    def factory() -> PettingZooWrapper:
        env = raw()
        env.state = lambda: np.array([[env.steps > 2, True]], dtype)
        return PettingZooWrapper(env, return_state=True)

    env = BoundEnv(factory())
    assert env["state"].dtype == dtype
    assert env["state"].tolist() == [[False, True]]
    space = env.env.observation_space["state"]
    assert space.contains(np.ones((1, 2), dtype))
    check_env(factory)


@RAW
def test_an_error_in_state_is_raised_until_an_agent_left(raw: Any) -> None:
    script = Script(ends={"agent_1": (2, "terminated")})
    env = wrapped(raw, script, return_state=True, done_on_any=False)
    zoo = env.env.env
    state = zoo.state

    def broken() -> Any:
        raise ZeroDivisionError

    zoo.state = broken
    with pytest.raises(ZeroDivisionError):
        env.env.reset_row(0)
    with pytest.raises(ZeroDivisionError):
        env.step()
    zoo.state = state
    env.step()
    assert not env["agents", "done"].all()
    assert env["agents", "done"].any()
    zoo.state = broken
    env.step()
    assert env["state"].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_actions_beyond_a_box_are_clipped_and_large_ones_are_kept(dtype: Any) -> None:
    env = scripted(Script(action=spaces.Box(-1, 1, (2,), dtype)))
    env.step(agent=[[0, 0.5], [-7, 7], [np.inf, -np.inf]])
    actions = [action.tolist() for action in env.env.env.received[0].values()]
    assert actions == [[0, 0.5], [-1, 1], [1, -1]]
    env = scripted(Script(action=spaces.Box(-np.inf, np.inf, (2,), dtype)))
    env.step(agent=[60000, 1])  # Its square is infinite in float16.
    assert env.env.env.received[0]["agent_1"].tolist() == [60000, 1]


FIRST = [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("space", "legal", "wrong", "words"),
    [
        *[(spaces.Discrete(5), 0, wrong, "expected an int") for wrong in (-1, 5)],
        *[
            (None, FIRST, wrong, "is not one-hot")
            for wrong in ([0] * 5, [0, 2, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 1, -1, 0])
        ],
        *[
            (spaces.MultiDiscrete([3, 4]), [0, 0], wrong, "expected int")
            for wrong in ([0, 4], [3, 0], [-1, 0])
        ],
        (spaces.MultiDiscrete([3, 4], start=[5, 5]), [0, 0], [0, 4], "expected int"),
        (spaces.MultiBinary(2), [0, 0], [2, 0], "expected int"),
        (spaces.MultiBinary(2), [0, 0], [0, -1], "expected int"),
        *[
            (spaces.Box(-np.inf, np.inf, (2,), dtype), [0, 0], [0, np.nan], "no NaN")
            for dtype in (np.float16, np.float32)
        ],
    ],
)
def test_an_impossible_action_is_an_error_only_of_an_agent_that_acts(
    space: Any, legal: Any, wrong: Any, words: str
) -> None:
    script = Script(
        action=space or spaces.Discrete(5), ends={"agent_2": (1, "terminated")}
    )
    options = {"categorical_actions": space is not None, "done_on_any": False}
    env = scripted(script, **options)
    env.step(agent=[legal] * 3)
    with pytest.raises(ValueError, match=f"agent_1 in agent/action.*{words}"):
        env.step(agent=[legal, wrong, legal])
    assert len(env.env.env.received) == 1
    env.step(agent=[legal, legal, wrong])  # agent_2 is dead


def test_as_many_ones_as_agents_are_not_one_hot() -> None:
    rows = [[1, 0, 0, 0, 1], [0] * 5, [0, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match="agent_0 in agent/action is not one-hot"):
        scripted(categorical_actions=False).step(agent=rows)
