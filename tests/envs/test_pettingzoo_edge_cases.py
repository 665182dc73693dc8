"""Unusual PettingZoo environments: dtypes, late agents, reused arrays."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns
from zoo_tools import BoundEnv, scripted

from marl_collect import Collector, MarlGroupMapType, RandomPolicy
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import check_env

torch = pytest.importorskip("torch")

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
RAW = pytest.mark.parametrize("raw", [ScriptedEnv, ScriptedTurns])


def wrapped(raw: Any, script: Script | None = None, **keywords: Any) -> BoundEnv:
    return BoundEnv(PettingZooWrapper(raw(script), group_map=IN_ONE, **keywords))


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


@pytest.mark.parametrize("state", [[[1], [1, 2]], None, "text", np.array([1j])])
def test_a_state_that_is_not_an_array_of_numbers_is_an_error(state: Any) -> None:
    raw = ScriptedEnv()
    raw.state = lambda: state  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="scripted_v0: return_state=True needs"):
        PettingZooWrapper(raw, return_state=True)


def test_a_state_whose_shape_changes_is_an_error() -> None:
    raw = ScriptedEnv()
    raw.state = lambda: np.zeros(2 + raw.steps)  # type: ignore[method-assign]
    env = BoundEnv(PettingZooWrapper(raw, return_state=True))
    with pytest.raises(ValueError, match=r"^state must have the shape \(2,\)"):
        env.step()


@RAW
def test_an_error_in_state_is_raised_until_an_agent_left(raw: Any) -> None:
    env = wrapped(
        raw,
        Script(ends={"agent_1": (2, "terminated")}),
        return_state=True,
        done_on_any=False,
    )
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


@RAW
@pytest.mark.parametrize(
    "dtype", [np.float16, np.float64, np.uint8, np.int8, np.uint32, np.int64, np.bool_]
)
@pytest.mark.parametrize("width", [2, 40])
def test_box_actions_and_observations_of_any_dtype(
    raw: Any, dtype: Any, width: int
) -> None:
    box = spaces.Box(0, 1, (width,), dtype)
    script = Script(
        action=box,
        observation=box,
        observe=lambda i, s, a: np.zeros(width, dtype) if a is None else a,
    )
    env = wrapped(raw, script)
    sent = np.ones((3, width), dtype)
    env.step(agents=sent)
    received = env.env.env.received[-1]
    value = received["agent_0"] if raw is ScriptedEnv else received[1]
    assert value.dtype == dtype
    assert (value == 1).all()
    if raw is ScriptedEnv:
        assert (env["agents", "observation"] == sent).all()
        assert env["agents", "observation"].dtype == dtype
    check_env(lambda: PettingZooWrapper(raw(script)), episodes=1)


def test_float16_actions_are_clipped_and_nan_is_an_error() -> None:
    everything = spaces.Box(-np.inf, np.inf, (2,), np.float16)
    env = scripted(Script(action=everything))
    env.step(agent=[60000, 1])  # the square of 60000 is infinite in float16
    assert env.env.env.received[-1]["agent_1"].tolist() == [60000, 1]
    with pytest.raises(ValueError, match="agent_0 in agent/action contains NaN"):
        env.step(agent=np.nan)
    env = scripted(Script(action=spaces.Box(-1, 1, (2,), np.float16)))
    env.step(agent=3)
    assert env.env.env.received[-1]["agent_1"].tolist() == [1, 1]


def test_float16_actions_are_collected() -> None:
    script = Script(action=spaces.Box(-1, 1, (2,), np.float16))
    with Collector(
        lambda: PettingZooWrapper(ScriptedEnv(script)),
        RandomPolicy(),
        frames_per_batch=20,
        total_frames=40,
    ) as collector:
        for batch in collector:
            assert batch["agent", "action"].dtype == torch.float16
            assert batch["agent", "action"].float().std() > 0.1


@pytest.mark.parametrize("space", [np.longdouble, ">f4"])
def test_dtypes_that_torch_lacks(space: Any) -> None:
    box = spaces.Box(-1, 99, (3,), np.dtype(space))
    script = Script(observation=box)
    if space is np.longdouble:
        with pytest.raises(TypeError, match="which torch does not have"):
            scripted(script)
        return
    env = scripted(script)
    env.step(agent=[1, 2, 3])
    assert env["agent", "observation"].tolist() == [[0, 1, 1], [1, 1, 2], [2, 1, 3]]
    assert torch.from_numpy(env["agent", "observation"]).dtype == torch.float32


@pytest.mark.parametrize(
    ("space", "value", "dtype"),
    [
        (spaces.MultiBinary(3), [0, 1, 1], np.int8),
        (spaces.MultiDiscrete([3, 4]), [2, 3], np.int64),
        (spaces.MultiDiscrete([3, 4], dtype=np.uint8), [2, 3], np.uint8),
        (spaces.Discrete(4), 3, np.int64),
        (spaces.Discrete(4, start=7), 9, np.int64),
        (spaces.Discrete(4, dtype=np.int32), 3, np.int32),
    ],
)
def test_observations_keep_the_dtype_of_their_space(
    space: Any, value: Any, dtype: Any
) -> None:
    script = Script(observation=space, observe=lambda i, s, a: value)
    env = scripted(script)
    assert env["agent", "observation"].dtype == dtype
    assert env["agent", "observation"].tolist() == [value] * 3
    check_env(lambda: PettingZooWrapper(ScriptedEnv(script)))


def test_discrete_actions_are_int64_for_any_dtype_of_the_space() -> None:
    for space in (
        spaces.MultiBinary(3),
        spaces.MultiDiscrete([3, 4], dtype=np.int8),
        spaces.Discrete(4, dtype=np.int16),
    ):
        env = scripted(Script(action=space))
        assert env["agent", "action"].dtype == np.int64


class Everybody:
    """Returns values for all agents in every step, as some environments do."""

    def __init__(self, raw: ScriptedEnv) -> None:
        self.raw = raw
        self.reset, self.step = raw.reset, raw.step
        raw.reset = self.begin  # type: ignore[method-assign]
        raw.step = self.go  # type: ignore[method-assign]

    def begin(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = self.reset(seed)
        return self.all_of(observations, np.full(3, 7.0)), self.all_of(infos, {"x": 7})

    def go(self, actions: Any) -> Any:
        observations, rewards, terminations, truncations, infos = self.step(actions)
        return (
            self.all_of(observations, np.full(3, 7.0)),
            self.all_of(rewards, 7.0),
            self.all_of(terminations, False),
            self.all_of(truncations, False),
            self.all_of(infos, {"x": 7}),
        )

    def all_of(self, results: Any, default: Any) -> Any:
        return {agent: results.get(agent, default) for agent in self.raw.script.agents}


def test_rows_are_zeros_until_their_agents_join() -> None:
    script = Script(
        joins={"agent_1": 2},
        ends={"agent_2": (3, "terminated")},
        info=lambda i, step: {"x": step},
    )

    def factory() -> PettingZooWrapper:
        raw = ScriptedEnv(script)
        Everybody(raw)
        return PettingZooWrapper(
            raw, info_keys={"x": ()}, done_on_any=False, episode_reward=True
        )

    env = BoundEnv(factory())
    assert not env["agent", "observation"][1].any()
    for step in range(1, 6):
        env["agent", "reward"][...] = 5  # as an earlier episode may have left it
        env.step()
        observation, reward = env["agent", "observation"], env["agent", "reward"]
        expected = [1, step, 0] if step >= 2 else [0, 0, 0]
        assert observation[1].tolist() == expected
        assert env["agent", "info", "x"][1] == (step if step >= 2 else 0)
        assert reward[1] == (0 if step < 2 else 7 if step == 2 else 10 + step)
        if step > 3:
            assert not observation[2].any()
            assert reward[2] == 0
    check_env(factory)


def test_an_agent_that_is_dead_after_the_reset_takes_no_part() -> None:
    raw = ScriptedTurns()
    reset = raw.reset

    def dead(seed: int | None = None, options: Any = None) -> None:
        reset(seed)
        raw.terminations["agent_0"] = True
        raw.agent_selection = "agent_1"
        raw._deads_step_first()

    raw.reset = dead  # type: ignore[method-assign]
    env = BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE))
    assert env.flags("agents") == [[False] * 3] * 3
    assert env["agents", "mask"].tolist() == [False, True, False]
    env.step()
    assert env.flags("agents")[0] == [False] * 3
    assert raw.received[-1] == ("agent_1", 0)


@RAW
def test_observations_that_are_reused_are_copied(raw: Any) -> None:
    buffer = np.zeros(3, np.float32)

    def observe(i: int, step: int, action: Any) -> Any:
        buffer[:] = [i, step, 0]
        return buffer

    if raw is ScriptedEnv:  # all agents get the same array
        env = wrapped(raw, Script(observe=observe))
        assert (env["agents", "observation"] == [2, 0, 0]).all()
        return
    env = wrapped(raw, Script(observe=observe))
    env.step()
    env.step()
    assert env["agents", "observation"].tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 0]]


@pytest.mark.parametrize("make", [list, tuple, np.float64, torch.tensor, np.int32])
def test_lists_tensors_and_other_dtypes_are_accepted(make: Any) -> None:
    env = scripted(Script(observe=lambda i, s, a: make([i, s, 0])))
    env.step()
    assert env["agent", "observation"].tolist() == [[0, 1, 0], [1, 1, 0], [2, 1, 0]]


@pytest.mark.parametrize("reward", [np.float16(2), np.array(2.0), 2, np.int8(2)])
def test_rewards_may_be_any_number(reward: Any) -> None:
    raw = ScriptedEnv()
    step = raw.step
    raw.step = lambda a: (step(a)[0], dict.fromkeys(raw.agents, reward), *step(a)[2:])  # type: ignore[method-assign, assignment]
    env = BoundEnv(PettingZooWrapper(raw))
    env.step()
    assert env["agent", "reward"].ravel().tolist() == [2, 2, 2]


@pytest.mark.parametrize("reward", [None, "2", np.ones(2), [1.0], 1j])
def test_a_reward_that_is_not_a_number_is_an_error(reward: Any) -> None:
    raw = ScriptedEnv()
    step = raw.step

    def go(actions: Any) -> Any:
        observations, _, *flags = step(actions)
        return (observations, dict.fromkeys(raw.agents, reward), *flags)

    raw.step = go  # type: ignore[method-assign]
    env = BoundEnv(PettingZooWrapper(raw))
    with pytest.raises(ValueError, match="The reward of agent agent_0 must be a numb"):
        env.step()


def test_infos_may_be_none() -> None:
    script = Script(info=lambda i, s: None)  # type: ignore[arg-type, return-value]
    env = scripted(script, info_keys=["speed"])
    env.step()
    assert not env["agent", "info", "speed"].any()
    check_env(lambda: PettingZooWrapper(ScriptedEnv(script), info_keys=["speed"]))
    check_env(lambda: PettingZooWrapper(ScriptedTurns(script), info_keys=["speed"]))


@pytest.mark.parametrize(
    "result",
    [None, ({}, {}, {}, {}), ({}, {}, None, {}, {}), ({}, {}, {}, {}, None), 3],
)
def test_a_wrong_result_of_step_is_an_error_that_names_the_environment(
    result: Any,
) -> None:
    raw = ScriptedEnv()
    env = BoundEnv(PettingZooWrapper(raw))
    raw.step = lambda actions: result  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="scripted_v0: step.. must return five mapping"):
        env.step()


def test_an_agent_may_join_when_another_is_removed() -> None:
    script = Script(
        joins={"agent_2": 99},
        ends={"agent_0": (1, "terminated")},
        info=lambda i, step: {"x": 10 + i},
    )
    raw = ScriptedTurns(script)
    take_out = raw._was_dead_step

    def was_dead_step(action: Any) -> None:
        take_out(action)
        raw._welcome("agent_2")
        raw.infos["agent_2"] = {"x": 7}

    raw._was_dead_step = was_dead_step
    env = BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE, info_keys={"x": ()}))
    env.step()
    assert env.flags("agents")[0] == [True, False, False]
    assert env["agents", "info", "x"].tolist() == [10, 11, 7]
    env.step()
    assert env["agents", "mask"].tolist() == [False, False, True]
    assert env["agents", "info", "x"].tolist() == [0, 11, 12]
