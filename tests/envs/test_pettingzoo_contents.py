"""PettingZoo: how results are written to rows, and actions read from them."""

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns, altered
from workloads.free import FreeEnv
from zoo_tools import NESTED, BoundEnv, nested, scripted

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


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("reward", [None, "2", np.ones(2), [1.0], 1j, 10**400])
def test_a_reward_that_is_not_a_number_is_an_error(reward: Any, others: bool) -> None:
    def spoil(results: Any) -> None:
        if not others:
            del results[1]["agent_2"]
        results[1]["agent_1"] = reward

    with pytest.raises(ValueError, match="The reward of agent agent_1 must be a numb"):
        stepped(spoil)


@pytest.mark.parametrize(
    ("index", "value"), [(0, np.zeros(3)), (1, 0.0)], ids=["observation", "reward"]
)
def test_an_unknown_agent_is_an_error_that_names_it(index: int, value: Any) -> None:
    with pytest.raises(ValueError, match=r"'ghost', which is not one.*agent_0"):
        stepped(lambda results: results[index].update(ghost=value))


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
    "result",
    [
        *(None, ({}, {}, {}, {}), 3),
        *(({}, {}, None, {}, {}), ({}, {}, {}, {}, None)),
        *(([], {}, {}, {}, {}), ({}, [], {}, {}, {})),
    ],
)
def test_a_wrong_result_of_step_names_the_environment(result: Any) -> None:
    raw = ScriptedEnv()
    env = BoundEnv(PettingZooWrapper(raw))
    raw.step = lambda actions: result  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="scripted_v0: step.. must return five mapping"):
        env.step()


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
def test_wrong_observations_name_the_agent(observation: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scripted(Script(observe=lambda i, step, action: observation))


@pytest.mark.parametrize("first", [5, 200])
def test_integers_that_overflow_their_dtype_are_an_error(first: int) -> None:
    small = spaces.Box(-100, 100, (3,), np.int8)

    def observe(i: int, step: int, action: Any) -> Any:
        return np.full(3, 200 if step else first, dtype=np.int64)

    with pytest.raises(ValueError, match=r"agent_0 .*int8 .*value 200 of dtype int64"):
        scripted(Script(observation=small, observe=observe)).step()


def test_whole_numbers_in_an_integer_space_are_cast_and_others_are_errors() -> None:
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    whole = Script(observation=image, observe=lambda i, s, a: np.full((2, 2), 200))
    assert (scripted(whole)["agent", "observation"] == 200).all()
    half = Script(observation=image, observe=lambda i, s, a: np.full((2, 2), 0.5))
    with pytest.raises(ValueError, match=r"agent_0 must fit the dtype uint8.*float64"):
        scripted(half)
    with pytest.raises(ValueError, match="agent_ids"):
        scripted(whole, agent_ids=True)


@pytest.mark.parametrize("dtype", [np.longdouble, ">f4"])
def test_dtypes_that_torch_lacks(dtype: Any) -> None:
    script = Script(observation=spaces.Box(-1, 99, (3,), np.dtype(dtype)))
    if dtype is np.longdouble:
        with pytest.raises(TypeError, match="which torch does not have"):
            scripted(script)
        return
    env = scripted(script)
    env.step(agent=[1, 2, 3])
    assert env["agent", "observation"].tolist() == [[0, 1, 1], [1, 1, 2], [2, 1, 3]]
    assert torch.from_numpy(env["agent", "observation"]).dtype == torch.float32


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


def test_a_missing_entry_of_an_observation_is_an_error_that_names_it() -> None:
    def observe(*about: Any) -> Any:
        return {k: v for k, v in nested(*about).items() if k != "pair"}

    with pytest.raises(ValueError, match="agent_0 must have the entry 'pair'"):
        scripted(Script(observation=NESTED, observe=observe))


def test_the_shape_of_an_info_may_be_given() -> None:
    script = Script(info=lambda i, step: {"pair": [step, i]} if step else {})
    env = scripted(script, info_keys={"pair": (2,)})
    env.step()
    assert env["agent", "info", "pair"].tolist() == [[1, 0], [1, 1], [1, 2]]


def test_an_info_that_is_not_a_number_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="'text' of agent agent_0.*'hello'"):
        scripted(Script(info=lambda i, s: {"text": "hello"}), info_keys=["text"])


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


BOX = spaces.Box(0, 1, (2,))


@RAW
@pytest.mark.parametrize(
    ("state", "space"),
    [
        *[({"a": np.zeros(2)}, space) for space in (spaces.Dict(a=BOX), None)],
        ((np.zeros(2),), spaces.Tuple([BOX])),
        *[(state, None) for state in ([[1], [1, 2]], None, "text", np.array([1j]))],
    ],
)
def test_states_of_several_arrays_are_refused(raw: Any, state: Any, space: Any) -> None:
    env = raw()
    env.state = lambda: state
    if space is not None:
        env.state_space = space
    problem = r"state\(\) returned" if space is None else "state_space is"
    message = rf"scripted_v0: return_state=True .*single array .*{problem}.*flatten_sp"
    with pytest.raises(TypeError, match=message):
        PettingZooWrapper(env, return_state=True)


def test_return_state_without_a_state_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs an environment with state\(\)"):
        PettingZooWrapper(FreeEnv(), return_state=True)


def test_a_state_whose_shape_changes_is_an_error() -> None:
    raw = ScriptedEnv()
    raw.state = lambda: np.zeros(2 + raw.steps)  # type: ignore[method-assign]
    env = BoundEnv(PettingZooWrapper(raw, return_state=True))
    with pytest.raises(ValueError, match=r"^state must have the shape \(2,\)"):
        env.step()


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
def test_actions_beyond_a_box_are_clipped(dtype: Any) -> None:
    env = scripted(Script(action=spaces.Box(-1, 1, (2,), dtype)))
    env.step(agent=[[0, 0.5], [-7, 7], [np.inf, -np.inf]])
    actions = [action.tolist() for action in env.env.env.received[0].values()]
    assert actions == [[0, 0.5], [-1, 1], [1, -1]]


@pytest.mark.parametrize(
    "wrong", [[0, 0, 0, 0, 0], [0, 2, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 1, -1, 0]]
)
def test_a_row_that_is_not_one_hot_is_an_error(wrong: list[int]) -> None:
    env = scripted(categorical_actions=False)
    action = np.eye(5, dtype=np.int64)[[4, 0, 2]]
    action[1] = wrong
    with pytest.raises(ValueError, match=r"of agent agent_1 in agent/action is not on"):
        env.step(agent=action)
    # There are three ones, as many as agents, but not one per row.
    rows = [[1, 0, 0, 0, 1], [0] * 5, [0, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match="agent_0 in agent/action is not one-hot"):
        env.step(agent=rows)


def test_rows_of_dead_agents_need_not_be_one_hot() -> None:
    script = Script(ends={"agent_1": (1, "terminated")})
    env = scripted(script, categorical_actions=False, done_on_any=False)
    action = np.eye(5, dtype=np.int64)[[4, 0, 2]]
    env.step(agent=action)
    action[1] = 0
    env.step(agent=action)
    assert env.env.env.received[1] == {"agent_0": 4, "agent_2": 2}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nan_is_an_error_that_names_group_and_agent(dtype: Any) -> None:
    # The square of 60000 is infinite in float16.
    env = scripted(Script(action=spaces.Box(-np.inf, np.inf, (2,), dtype)))
    env.step(agent=[60000, 1])
    assert env.env.env.received[-1]["agent_1"].tolist() == [60000, 1]
    with pytest.raises(ValueError, match="agent_1 in agent/action: expected .* no NaN"):
        env.step(agent=[[0, 0], [0, np.nan], [0, 0]])


@pytest.mark.parametrize("action", [-1, 5])
def test_an_action_out_of_range_is_an_error(action: int) -> None:
    env = scripted()
    with pytest.raises(ValueError, match=f"{action} of agent agent_2.*from 0 to 4"):
        env.step(agent=[0, 0, action])


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (spaces.MultiDiscrete([3, 4]), [0, 4]),
        (spaces.MultiDiscrete([3, 4]), [3, 0]),
        (spaces.MultiDiscrete([3, 4]), [-1, 0]),
        (spaces.MultiDiscrete([3, 4], start=[5, 5]), [0, 4]),
        (spaces.MultiBinary(2), [2, 0]),
        (spaces.MultiBinary(2), [0, -1]),
    ],
)
def test_numbers_out_of_range_are_an_error(space: Any, wrong: list[int]) -> None:
    script = Script(action=space, ends={"agent_2": (1, "terminated")})
    env = scripted(script, done_on_any=False)
    env.step()
    with pytest.raises(ValueError, match="agent agent_1 in agent/action: expected int"):
        env.step(agent=[[0, 0], wrong, [0, 0]])
    assert len(env.env.env.received) == 1
    env.step(agent=[[0, 0], [0, 0], wrong])  # agent_2 is dead
