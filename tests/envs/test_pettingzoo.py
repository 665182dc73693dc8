"""PettingZoo parallel environments: rows, masks, flags, actions and keywords."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

pytest.importorskip("pettingzoo")

from marl_collect import MarlGroupMapType
from marl_collect.check import ContractError, check_env
from marl_collect.description import allocate
from marl_collect.env import MultiAgentEnv
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.testing.free import FreeEnv
from marl_collect.testing.zoo import Script, ScriptedEnv, ScriptedTurns


class Driven:
    """An environment and its row, driven as the engine does."""

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env = env
        self.row = allocate(env.description.row())
        for array in self.row.values():
            array.fill(1)  # memory may hold anything before the reset
        env.bind(self.row)
        env.reset_row(3)

    def step(self, **actions: Any) -> None:
        for group in self.env.description.groups:
            self.row[group, "action"][...] = actions.get(group, 0)
        self.env.step_row()

    def __getitem__(self, key: str | tuple[str, ...]) -> NDArray[Any]:
        return self.row[(key,) if isinstance(key, str) else key]

    def flags(self, *group: str) -> list[list[bool]]:
        names = ("done", "terminated", "truncated")
        return [self.row[(*group, name)].ravel().tolist() for name in names]


def scripted(script: Script | None = None, **keywords: Any) -> Driven:
    return Driven(PettingZooWrapper(ScriptedEnv(script), **keywords))


def test_rows_hold_what_the_environment_returns() -> None:
    env = scripted()
    assert env["agent", "observation"].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    env.step(agent=[1, 2, 3])
    assert env["agent", "observation"].tolist() == [[0, 1, 1], [1, 1, 2], [2, 1, 3]]
    assert env["agent", "reward"].ravel().tolist() == [1, 11, 21]
    assert env["agent", "mask"].all()
    assert env.flags("agent") == [[False] * 3] * 3
    assert env.flags() == [[False]] * 3


def test_an_agent_that_dies_is_seen_once_more_and_then_zero() -> None:
    script = Script(ends={"agent_1": (2, "terminated")})
    env = scripted(script, done_on_any=False)
    env.step()
    env.step()
    assert env["agent", "observation"][1].tolist() == [1, 2, 0]
    assert env["agent", "reward"].ravel().tolist() == [2, 12, 22]
    assert env["agent", "mask"].tolist() == [True, False, True]
    assert env.flags("agent")[:2] == [[False, True, False]] * 2
    env.step()
    assert not env["agent", "observation"][1].any()
    assert env["agent", "reward"].ravel().tolist() == [3, 0, 23]
    assert env.flags("agent")[1] == [False, True, False]
    assert env.flags() == [[False]] * 3


def test_a_dead_agents_action_is_not_sent() -> None:
    env = scripted(Script(ends={"agent_1": (1, "terminated")}), done_on_any=False)
    env.step()
    env.step(agent=[4, 99, 4])  # 99 is no action, and nobody takes it
    assert env.env.env.received[-1] == {"agent_0": 4, "agent_2": 4}


@pytest.mark.torchrl_defect("D2c")
def test_flags_stay_as_they_were_when_the_agent_ended() -> None:
    ends = {"agent_0": (1, "terminated"), "agent_1": (2, "truncated")}
    env = scripted(Script(ends=ends, max_cycles=4), done_on_any=False)
    for _ in range(4):
        env.step()
    done, terminated, truncated = env.flags("agent")
    assert (done, terminated) == ([True] * 3, [True, False, False])
    assert truncated == [False, True, True]


@pytest.mark.torchrl_defect("D2b")
def test_different_reasons_at_the_same_step_make_a_truncated_root() -> None:
    ends = {"agent_0": (2, "terminated"), "agent_1": (2, "truncated")}
    env = scripted(Script(n_agents=2, ends=ends), done_on_any=False)
    env.step()
    env.step()
    assert env.flags() == [[True], [False], [True]]
    assert env.flags("agent")[1:] == [[True, False], [False, True]]


def test_with_done_on_any_the_first_death_ends_it_and_truncates_the_rest() -> None:
    env = scripted(Script(ends={"agent_1": (2, "terminated")}))
    env.step()
    env.step()
    assert env.flags() == [[True], [True], [False]]
    assert env.flags("agent") == [[True] * 3, [False, True, False], [True, False, True]]
    assert not env["agent", "mask"].any()


def test_done_on_any_is_true_by_default_and_can_be_chosen() -> None:
    assert PettingZooWrapper(ScriptedEnv()).description.done_on_any
    kept = PettingZooWrapper(ScriptedEnv(), done_on_any=False)
    assert not kept.description.done_on_any


def test_an_agent_that_vanishes_without_a_flag_is_truncated() -> None:
    env = scripted(Script(ends={"agent_2": (1, "vanished")}), done_on_any=False)
    env.step()
    assert env.flags("agent") == [
        [False, False, True],
        [False] * 3,
        [False, False, True],
    ]


def test_an_agent_that_joins_late_has_an_empty_row_before() -> None:
    env = scripted(Script(joins={"agent_1": 2}), agent_ids=True)
    assert env["agent", "mask"].tolist() == [True, False, True]
    assert not env["agent", "observation"][1].any()
    env.step()
    env.step()
    assert env["agent", "mask"].all()
    assert env["agent", "observation"][1].tolist() == [1, 2, 0, 0, 1, 0]
    env.step(agent=[1, 2, 3])
    assert env.env.env.received[-1] == {"agent_0": 1, "agent_1": 2, "agent_2": 3}


def test_an_agent_that_comes_back_after_its_end_stays_done() -> None:
    raw = ScriptedEnv(Script(ends={"agent_1": (1, "terminated")}))
    env = Driven(PettingZooWrapper(raw, done_on_any=False))
    env.step()
    raw.script = Script()  # by which agent_1 never ended
    env.step()
    env.step()
    assert list(raw.received[-1]) == ["agent_0", "agent_1", "agent_2"]
    assert env["agent", "mask"].tolist() == [True, False, True]
    assert not env["agent", "observation"][1].any()
    assert env["agent", "reward"].ravel().tolist() == [3, 0, 23]
    assert env.flags("agent")[1] == [False, True, False]


def test_agents_may_be_listed_in_any_order() -> None:
    raw = ScriptedEnv()
    reset = raw.reset

    def reversed_reset(seed: int | None = None) -> Any:
        observations, infos = reset(seed=seed)
        raw.agents = raw.agents[::-1]
        return dict(reversed(observations.items())), infos

    raw.reset = reversed_reset  # type: ignore[method-assign, assignment]
    env = Driven(PettingZooWrapper(raw))
    env.step(agent=[1, 2, 3])
    assert list(raw.received[0].items()) == [
        ("agent_2", 3),
        ("agent_1", 2),
        ("agent_0", 1),
    ]
    assert env["agent", "observation"].tolist() == [[0, 1, 1], [1, 1, 2], [2, 1, 3]]
    assert not env["done"].any()


def test_a_device_other_than_the_cpu_is_refused_with_a_way_out() -> None:
    PettingZooWrapper(ScriptedEnv(), device="cpu")
    with pytest.raises(ValueError, match="storing_device='cuda:0'"):
        PettingZooWrapper(ScriptedEnv(), device="cuda:0")


def test_an_episode_without_an_agent_that_never_joined_ends_too() -> None:
    ends = {"agent_0": (2, "terminated"), "agent_2": (1, "terminated")}
    script = Script(ends=ends, joins={"agent_1": 99})
    env = scripted(script, done_on_any=False)
    env.step()
    assert env.flags() == [[False]] * 3
    env.step()
    assert env.flags() == [[True], [True], [False]]


def test_an_unknown_agent_is_an_error_that_names_it() -> None:
    raw = ScriptedEnv()
    env = Driven(PettingZooWrapper(raw))
    step = raw.step
    raw.step = lambda actions: ({"ghost": np.zeros(3)}, *step(actions)[1:])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"'ghost'.*possible_agents.*agent_0"):
        env.step()


def test_a_second_episode_begins_clean() -> None:
    env = scripted(Script(ends={"agent_1": (1, "terminated")}), agent_ids=True)
    env.step()
    env.env.reset_row(4)
    assert env["agent", "observation"][:, :3].tolist() == [
        [0, 0, 0],
        [1, 0, 0],
        [2, 0, 0],
    ]
    assert (env["agent", "observation"][:, 3:] == np.eye(3)).all()
    assert env["agent", "mask"].all()
    assert env.flags("agent") == [[False] * 3] * 3
    assert env.flags() == [[False]] * 3


@pytest.mark.parametrize(
    ("group_map", "groups"),
    [
        (None, {"agent": ["agent_0", "agent_1", "agent_2"]}),
        (
            MarlGroupMapType.ALL_IN_ONE_GROUP,
            {"agents": ["agent_0", "agent_1", "agent_2"]},
        ),
        (
            MarlGroupMapType.ONE_GROUP_PER_AGENT,
            {"agent_0": ["agent_0"], "agent_1": ["agent_1"], "agent_2": ["agent_2"]},
        ),
        (
            {"b": ["agent_2", "agent_0"], "a": ["agent_1"]},
            {"b": ["agent_2", "agent_0"], "a": ["agent_1"]},
        ),
    ],
)
def test_groups_and_their_order_are_as_asked_for(group_map: Any, groups: Any) -> None:
    env = scripted(group_map=group_map)
    assert env.env.group_map == groups
    env.step(
        **{g: [int(name[-1]) + 1 for name in names] for g, names in groups.items()}
    )
    assert env.env.env.received == [{"agent_0": 1, "agent_1": 2, "agent_2": 3}]
    for group, names in groups.items():
        rows = env[group, "observation"][:, 0].tolist()
        assert rows == [int(name[-1]) for name in names]


@pytest.mark.parametrize(
    ("group_map", "said"),
    [
        ({"a": ["agent_0", "agent_1"]}, r"missing: \['agent_2'\]"),
        ({"a": ["agent_0", "agent_1", "agent_2", "x"]}, r"unknown: \['x'\]"),
        ({"a": ["agent_0", "agent_1", "agent_2", "agent_2"]}, "repeated"),
        ({"next": ["agent_0", "agent_1", "agent_2"]}, "keys already: .'next'"),
    ],
)
def test_a_group_map_names_every_agent_exactly_once(group_map: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scripted(group_map=group_map)


UNLIKE = Script(
    observation={
        "agent_0": spaces.Box(0, 9, (2,), np.float32),
        "agent_1": spaces.Box(0, 9, (4,), np.float32),
        "agent_2": spaces.Box(0, 9, (2,), np.float32),
    },
    observe=lambda i, step, action: np.full(4 if i == 1 else 2, i, dtype=np.float32),
)


def test_unlike_agents_of_one_prefix_get_groups_of_their_own() -> None:
    env = scripted(UNLIKE)
    assert env.env.group_map == {
        "agent_kind0": ["agent_0", "agent_2"],
        "agent_kind1": ["agent_1"],
    }
    assert env["agent_kind1", "observation"].tolist() == [[1, 1, 1, 1]]


def test_unlike_agents_in_a_group_that_was_asked_for_are_an_error_that_says_how() -> (
    None
):
    with pytest.raises(ValueError, match=r"agent_0 observes.*agent_1.*group_map="):
        scripted(UNLIKE, group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)


def test_unlike_actions_in_one_group_are_an_error() -> None:
    names = enumerate(Script().agents)
    actions: dict[str, Any] = {a: spaces.Discrete(i + 2) for i, a in names}
    with pytest.raises(ValueError, match=r"acts in Discrete\(2\)"):
        scripted(Script(action=actions), group_map={"x": Script().agents})


@pytest.mark.parametrize(
    ("space", "written", "received"),
    [
        (spaces.Discrete(5, start=7), [0, 1, 4], [7, 8, 11]),
        (
            spaces.MultiDiscrete([3, 4]),
            [[0, 0], [2, 3], [1, 1]],
            [[0, 0], [2, 3], [1, 1]],
        ),
        (spaces.MultiBinary(2), [[0, 1], [1, 1], [0, 0]], [[0, 1], [1, 1], [0, 0]]),
        (
            spaces.Box(-1, 1, (2,), np.float32),
            [[0, 0.5], [-7, 7], [np.inf, -np.inf]],
            [[0, 0.5], [-1, 1], [1, -1]],
        ),
    ],
)
def test_actions_arrive_as_the_space_has_them(
    space: Any, written: Any, received: Any
) -> None:
    env = scripted(Script(action=space))
    env.step(agent=written)
    actions = env.env.env.received[0]
    assert [np.asarray(a).tolist() for a in actions.values()] == received
    env.step(agent=[written[0]] * 3)
    # What the environment was given before is its own: it stays as it was.
    assert [np.asarray(a).tolist() for a in actions.values()] == received
    if not isinstance(space, spaces.Box):
        assert all(space.contains(action) for action in actions.values())


def test_one_hot_actions_are_counted() -> None:
    env = scripted(categorical_actions=False)
    assert env["agent", "action"].shape == (3, 5)
    env.step(agent=np.eye(5, dtype=np.int64)[[4, 0, 2]])
    assert env.env.env.received == [{"agent_0": 4, "agent_1": 0, "agent_2": 2}]


@pytest.mark.parametrize(
    "wrong", [[0, 0, 0, 0, 0], [0, 2, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 1, -1, 0]]
)
def test_a_row_that_is_not_one_hot_is_an_error(wrong: list[int]) -> None:
    env = scripted(categorical_actions=False)
    action = np.eye(5, dtype=np.int64)[[4, 0, 2]]
    action[1] = wrong
    with pytest.raises(ValueError, match=r"of agent agent_1 in agent/action is not on"):
        env.step(agent=action)
    # Three ones in all, as many as there are agents.
    two = [[1, 0, 0, 0, 1], [0] * 5, [0, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match="agent_0 in agent/action is not one-hot"):
        env.step(agent=two)


def test_what_stands_where_nobody_acts_need_not_be_one_hot() -> None:
    script = Script(ends={"agent_1": (1, "terminated")})
    env = scripted(script, categorical_actions=False, done_on_any=False)
    action = np.eye(5, dtype=np.int64)[[4, 0, 2]]
    env.step(agent=action)
    action[1] = 0
    env.step(agent=action)
    assert env.env.env.received[1] == {"agent_0": 4, "agent_2": 2}


@pytest.mark.parametrize("reward", [None, "much", [1.0, 2.0]])
def test_a_reward_that_is_no_number_names_its_agent(reward: Any) -> None:
    class Odd(ScriptedEnv):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            out = super().step(actions)
            out[1]["agent_1"] = reward
            return out

    env = Driven(PettingZooWrapper(Odd()))
    with pytest.raises(ValueError, match="reward of agent agent_1 must be a number"):
        env.step()


def test_a_reward_of_an_unknown_agent_names_it() -> None:
    class Odd(ScriptedEnv):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            out = super().step(actions)
            out[1]["agent_9"] = 0.0
            return out

    env = Driven(PettingZooWrapper(Odd()))
    with pytest.raises(ValueError, match="'agent_9', which is not among its"):
        env.step()


class Sloppy(ScriptedEnv):  # type: ignore[misc]
    """An environment whose answers can be changed after the fact."""

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


def drop(part: int, step: int) -> Any:
    def spoil(env: Sloppy) -> None:
        if env.steps >= step and len(env.now) > part:
            env.now[part].pop("agent_2", None)

    return spoil


def stay(env: Sloppy) -> None:
    if env.steps in (2, 3):
        env.agents = ["agent_0", "agent_1", "agent_2"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (drop(0, 0), r"After reset_row.*lists agent_2, but there is no observation"),
        (drop(0, 1), r"Step 1 of .*lists agent_2, but there is no observation of it"),
        (drop(1, 2), r"Step 2 of .*lists agent_2, but there is no reward of it"),
        (drop(2, 3), r"Step 3 of .*lists agent_2, but there is no termination of it"),
        (stay, r"Step 2 of .*agent_1 is done, but env.agents still lists it"),
    ],
)
def test_check_env_finds_answers_that_lack_an_agent(spoil: Any, said: str) -> None:
    def factory() -> PettingZooWrapper:
        return PettingZooWrapper(Sloppy(spoil), done_on_any=False)

    with pytest.raises(ContractError) as caught:
        check_env(factory, episodes=2)
    assert any(re.search(said, finding) for finding in caught.value.findings)
    assert len(caught.value.findings) <= 3, "each is said once, not in every step"


def test_nested_actions_arrive_nested() -> None:
    space = spaces.Dict(
        {"move": spaces.Discrete(3), "aim": spaces.Tuple([spaces.Box(0, 1, (1,))])}
    )
    look = np.zeros(3, dtype=np.float32)
    env = scripted(Script(n_agents=2, action=space, observe=lambda i, s, a: look))
    env.row["agent", "action", "move"][...] = [1, 2]
    env.row["agent", "action", "aim", "0"][...] = [[0.5], [9.0]]
    env.env.step_row()
    first, second = env.env.env.received[0].values()
    assert (first["move"], first["aim"][0].tolist()) == (1, [0.5])
    assert (second["move"], second["aim"][0].tolist()) == (2, [1.0])


def test_nan_is_an_error_that_names_group_and_agent() -> None:
    env = scripted(Script(action=spaces.Box(-1, 1, (2,), np.float32)))
    with pytest.raises(ValueError, match="agent_1 in agent/action is not a number"):
        env.step(agent=[[0, 0], [0, np.nan], [0, 0]])


@pytest.mark.parametrize("action", [-1, 5])
def test_an_action_that_does_not_exist_is_an_error(action: int) -> None:
    env = scripted()
    with pytest.raises(ValueError, match=f"{action} of agent agent_2.*outside 0 to 4"):
        env.step(agent=[0, 0, action])


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
    ("observation", "said"),
    [
        (np.zeros(4), r"observation of agent agent_0 .*\(3,\).*\(4,\)"),
        (np.zeros(1), r"\(3,\).*\(1,\)"),
        ([[0.0], [1.0, 2.0]], "must be numbers"),
        ("text", "must be numbers of shape .*'text'"),
        ({"a": 1}, r"a dict with the keys \['a'\]"),
    ],
)
def test_a_wrong_observation_is_named(observation: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scripted(Script(observe=lambda i, step, action: observation))


def test_fractions_in_an_integer_space_are_an_error() -> None:
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    script = Script(observation=image, observe=lambda i, s, a: np.full((2, 2), 0.5))
    with pytest.raises(ValueError, match=r"agent_0 has the dtype float64.*uint8"):
        scripted(script)


def test_whole_numbers_in_an_integer_space_are_cast() -> None:
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    script = Script(observation=image, observe=lambda i, s, a: np.full((2, 2), 200))
    env = scripted(script)
    env.step()
    assert env["agent", "observation"].dtype == np.uint8
    assert (env["agent", "observation"] == 200).all()


NESTED = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "inner": spaces.Dict({"level": spaces.Discrete(9)}),
        "pair": spaces.Tuple([spaces.Box(0, 9, (1,)), spaces.MultiBinary(2)]),
    }
)


def nested(i: int, step: int, action: Any) -> dict[str, Any]:
    return {
        "image": np.full((2, 2, 3), step, dtype=np.uint8),
        "inner": {"level": i},
        "pair": (np.array([step], dtype=np.float32), np.array([0, 1], dtype=np.int8)),
    }


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


def test_a_missing_part_of_an_observation_is_named() -> None:
    script = Script(
        observation=NESTED,
        observe=lambda i, s, a: {
            k: v for k, v in nested(i, s, a).items() if k != "pair"
        },
    )
    with pytest.raises(ValueError, match="agent_0 lacks 'pair'"):
        scripted(script)


def test_agent_ids_stand_behind_a_flat_observation_in_every_group() -> None:
    env = scripted(
        agent_ids=True, group_map={"x": ["agent_2", "agent_1"], "y": ["agent_0"]}
    )
    assert env["x", "observation"].tolist() == [[2, 0, 0, 1, 0], [1, 0, 0, 0, 1]]
    assert env["y", "observation"].tolist() == [[0, 0, 0, 1]]
    env.step()
    assert (env["x", "observation"][:, 3:] == np.eye(2)).all()
    space = env.env.description.groups["x"].observation
    assert space.shape == (5,)
    assert all(space.contains(row) for row in env["x", "observation"])


def test_agent_ids_of_an_image_are_refused() -> None:
    script = Script(observation=spaces.Box(0, 255, (2, 2), np.uint8))
    with pytest.raises(ValueError, match="agent_ids"):
        scripted(script, agent_ids=True)


def legal(i: int, step: int) -> NDArray[np.int8]:
    mask = np.ones(5, dtype=np.int8)
    mask[(i + step) % 5] = 0
    return mask


def test_action_masks_come_from_observations() -> None:
    space = spaces.Dict(
        {
            "observation": spaces.Box(0, 9, (1,)),
            "action_mask": spaces.Box(0, 1, (5,), np.int8),
        }
    )
    script = Script(
        observation=space,
        observe=lambda i, s, a: {"observation": np.ones(1), "action_mask": legal(i, s)},
        ends={"agent_0": (2, "terminated")},
    )
    env = scripted(script, done_on_any=False)
    assert ("agent", "observation", "action_mask") not in env.row
    assert env["agent", "observation", "observation"].shape == (3, 1)
    assert env["agent", "action_mask"].dtype == np.bool_
    for step in range(3):
        expected = [legal(i, step) for i in range(3)]
        if step == 2:
            expected[0] = np.ones(5, dtype=np.int8)  # it acts no more
        assert (env["agent", "action_mask"] == expected).all()
        env.step()


def test_action_masks_come_from_infos() -> None:
    script = Script(info=lambda i, step: {"action_mask": legal(i, step)})
    env = scripted(script)
    for step in range(3):
        assert (env["agent", "action_mask"] == [legal(i, step) for i in range(3)]).all()
        env.step()


def test_random_actions_are_legal() -> None:
    script = Script(info=lambda i, step: {"action_mask": legal(i, step)}, max_cycles=40)
    env = PettingZooWrapper(ScriptedEnv(script))
    data = env.rollout(40)
    mask = data["agent", "action_mask"].gather(
        -1, data["agent", "action"].unsqueeze(-1)
    )
    assert bool(mask.all())


def test_infos_are_written_on_request() -> None:
    def info(i: int, step: int) -> dict[str, Any]:
        late = {"late": step} if step > 1 else {}
        return {"speed": np.array([i, step]), "text": "ignored", **late}

    script = Script(info=info, ends={"agent_2": (1, "terminated")})
    env = scripted(script, info_keys=["speed", "late"], done_on_any=False)
    assert env["agent", "info", "speed"].tolist() == [[0, 0], [1, 0], [2, 0]]
    env.step()
    env.step()
    assert env["agent", "info", "speed"].tolist() == [[0, 2], [1, 2], [0, 0]]
    assert env["agent", "info", "late"].tolist() == [2, 2, 0]
    assert env["agent", "info", "late"].dtype == np.float32


def test_an_infos_shape_may_be_given() -> None:
    script = Script(info=lambda i, step: {"pair": [step, i]} if step else {})
    env = scripted(script, info_keys={"pair": (2,)})
    env.step()
    assert env["agent", "info", "pair"].tolist() == [[1, 0], [1, 1], [1, 2]]


def test_an_info_that_is_no_number_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="'text' of agent agent_0.*'hello'"):
        scripted(Script(info=lambda i, s: {"text": "hello"}), info_keys=["text"])


def test_the_state_stands_at_the_root() -> None:
    env = scripted(return_state=True)
    assert env["state"].tolist() == [0, 0]
    env.step()
    assert env["state"].tolist() == [1, 1]


def test_an_environment_without_state_says_so() -> None:
    with pytest.raises(ValueError, match="has no state"):
        PettingZooWrapper(FreeEnv(), return_state=True)


def test_the_episode_reward_is_the_sum_since_the_reset() -> None:
    script = Script(ends={"agent_0": (2, "terminated")})
    env = scripted(script, episode_reward=True, done_on_any=False)
    for _ in range(3):
        env.step()
    assert env["agent", "episode_reward"].ravel().tolist() == [1 + 2, 36, 66]
    env.env.reset_row(0)
    env.step()
    assert env["agent", "episode_reward"].ravel().tolist() == [1, 11, 21]


def test_without_use_mask_there_is_no_mask_and_deaths_are_no_error() -> None:
    env = scripted(Script(ends={"agent_0": (1, "terminated")}), use_mask=False)
    assert ("agent", "mask") not in env.row
    env.step()
    assert env["done"].all()


def test_a_seed_of_the_factory_repeats_the_episodes_played_by_hand() -> None:
    pytest.importorskip("Box2D")
    first, second, other = (
        PettingZooEnv("multiwalker_v9", seed=seed).reset()["walker", "observation"]
        for seed in (5, 5, 6)
    )
    assert bool((first == second).all())
    assert bool((first != other).any())


def test_a_seed_of_the_factory_is_told_to_whoever_asks() -> None:
    assert PettingZooWrapper(ScriptedEnv(), seed=7).description.pinned_seed == 7
    assert PettingZooWrapper(ScriptedEnv()).description.pinned_seed is None


def test_render_returns_an_image_only_where_there_is_one() -> None:
    env = PettingZooWrapper(ScriptedEnv(render_mode="rgb_array"))
    env.reset()
    image = env.render()
    assert image is not None
    assert image.shape == (4, 5, 3)
    assert PettingZooWrapper(ScriptedEnv()).render() is None


def test_closing_twice_is_fine_and_seen() -> None:
    with PettingZooWrapper(ScriptedEnv()) as env:
        assert not env.is_closed
    env.close()
    assert env.is_closed


def test_a_class_where_an_environment_is_due_is_shown_the_factory() -> None:
    with pytest.raises(
        TypeError, match=r"lambda: PettingZooWrapper\(ScriptedEnv\(\)\)"
    ):
        PettingZooWrapper(ScriptedEnv)


@pytest.mark.parametrize("env", [ScriptedEnv(), ScriptedTurns()])
def test_an_instance_where_a_factory_is_due_is_shown_the_factory(env: Any) -> None:
    pytest.importorskip("torch")
    from marl_collect import Collector, RandomPolicy

    with pytest.raises(
        TypeError, match=rf"lambda: PettingZooWrapper\({type(env).__name__}"
    ):
        Collector(env, RandomPolicy(), frames_per_batch=4)
    with pytest.raises(TypeError, match=r"lambda: PettingZooEnv\('rps_v2'\)"):
        Collector("rps_v2", RandomPolicy(), frames_per_batch=4)  # type: ignore[arg-type]


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="ParallelEnv or AECEnv, but got 3"):
        PettingZooWrapper(3)


def test_an_environment_without_possible_agents_says_what_to_add() -> None:
    raw = ScriptedEnv()
    raw.possible_agents = []
    with pytest.raises(ValueError, match="possible_agents"):
        PettingZooWrapper(raw)


def test_a_space_without_arrays_names_the_key() -> None:
    with pytest.raises(TypeError, match="observation has the space Text"):
        scripted(Script(observation=spaces.Text(4)))


def test_the_task_may_be_a_module_and_a_name() -> None:
    env = PettingZooEnv("marl_collect.testing.free:FreeEnv", n_agents=2, size=5)
    assert env.group_map == {"agent": ["agent_0", "agent_1"]}
    assert env.observation_space["agent"]["observation"].shape == (2, 5)


@pytest.mark.parametrize(
    "script",
    [
        Script(),
        Script(ends={"agent_0": (2, "terminated"), "agent_1": (3, "truncated")}),
        Script(joins={"agent_2": 3}, ends={"agent_0": (2, "both")}),
        Script(observation=NESTED, observe=nested),
        Script(action=spaces.Box(-1, 1, (2,), np.float32)),
        Script(info=lambda i, step: {"action_mask": legal(i, step)}),
    ],
)
@pytest.mark.parametrize("done_on_any", [True, False])
def test_the_contract_holds(script: Script, done_on_any: bool) -> None:
    check_env(
        lambda: PettingZooWrapper(
            ScriptedEnv(script),
            done_on_any=done_on_any,
            return_state=True,
            episode_reward=True,
        )
    )


def test_a_custom_environment_defined_in_a_script_collects() -> None:
    env = PettingZooWrapper(ScriptedEnv(Script(max_cycles=6)))
    data = env.rollout(20)
    assert data.shape == (6,)
    assert data["next", "agent", "reward"].shape == (6, 3, 1)
    assert bool(data["next", "truncated"][-1])


def test_the_examples_of_the_docs_run() -> None:
    pytest.importorskip("Box2D")
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, str(page), "exec"), {"__name__": "example"})
