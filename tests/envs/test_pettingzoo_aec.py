"""Turn-based PettingZoo environments (AEC)."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedTurns

from marl_collect import MarlGroupMapType
from marl_collect.core.description import allocate
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

torch = pytest.importorskip("torch")

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP


class Turns:
    """A scripted environment with one group, stepped as the engine does."""

    def __init__(self, script: Script | None = None, **keywords: Any) -> None:
        self.raw = ScriptedTurns(script)
        keywords = {"group_map": IN_ONE, **keywords}
        self.env = PettingZooWrapper(self.raw, **keywords)
        self.row = allocate(self.env.description.row())
        for array in self.row.values():
            array.fill(1)
        self.env.bind(self.row)
        self.env.reset_row(3)

    def step(self, *actions: int) -> None:
        self.row["agents", "action"][...] = actions or 0
        self.env.step_row()

    def agents(self, name: str) -> list[Any]:
        return self.row["agents", name].reshape(3, -1).tolist()

    def root(self) -> list[bool]:
        names = ("done", "terminated", "truncated")
        return [bool(self.row[name,][0]) for name in names]


def test_only_the_agent_whose_turn_it_is_acts_and_observes() -> None:
    env = Turns()
    assert env.agents("mask") == [[True], [False], [False]]
    assert env.raw.observed == ["agent_0"]
    env.step(1, 2, 3)
    env.step(4, 3, 2)
    assert env.raw.received == [("agent_0", 1), ("agent_1", 3)]
    assert env.agents("mask") == [[False], [False], [True]]
    assert env.raw.observed == ["agent_0", "agent_1", "agent_2"]
    # agent_0 keeps its last observation, which is that of the reset.
    assert env.agents("observation") == [[0, 0, 0], [1, 1, 0], [2, 2, 0]]


def test_the_reward_is_not_cumulative() -> None:
    env = Turns()
    env.step()
    env.step()
    assert env.agents("reward") == [[2], [12], [22]]


def only_cumulative(raw: ScriptedTurns, ends: int) -> None:
    """Let rewards of 7, from step ``ends`` on, be in ``_cumulative_rewards`` only."""
    raw._accumulate_rewards = lambda: None
    step = raw.step

    def go(action: Any) -> None:
        step(action)
        raw._clear_rewards()
        if raw.steps >= ends:
            raw._cumulative_rewards = dict.fromkeys(raw.agents, 7.0)

    raw.step = go  # type: ignore[method-assign]


@pytest.mark.parametrize("first", [1, 3, 4])
def test_rewards_that_only_last_returns_are_an_error(first: int) -> None:
    env = Turns(Script(max_cycles=4))
    only_cumulative(env.raw, first)
    for _ in range(first - 1):
        env.step()
    message = (
        r"scripted_v0: last\(\) returns the reward 7.0 of agent_0, but env.rewards has "
        r"had only zeros so far"
    )
    with pytest.raises(RuntimeError, match=message):
        env.step()


def test_missing_rewards_are_an_error_that_names_the_environment() -> None:
    env = Turns()
    step = env.raw.step

    def go(action: Any) -> None:
        step(action)
        del env.raw.rewards

    env.raw.step = go  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="scripted_v0 has no env.rewards"):
        env.step()


def test_rewards_that_last_does_not_return_are_written() -> None:
    env = Turns()
    env.raw._accumulate_rewards = lambda: None
    env.step()
    assert env.agents("reward") == [[1], [11], [21]]
    check_env(lambda: PettingZooWrapper(ScriptedTurns()), episodes=1)


def test_check_env_compares_the_rewards_with_those_of_last() -> None:
    def factory() -> PettingZooWrapper:
        raw = ScriptedTurns()
        step = raw.step

        def go(action: Any) -> None:
            step(action)
            if raw.steps == 2:
                raw._cumulative_rewards["agent_2"] += 5

        raw.step = go  # type: ignore[method-assign]
        return PettingZooWrapper(raw)

    message = (
        r"last\(\) returns the reward 48.0 of agent_2, but its rewards since its last "
        r"turn sum to 43.0"
    )
    with pytest.raises(ContractError, match=message):
        check_env(factory)


@pytest.mark.torchrl_defect("D2")
def test_a_dead_agent_is_stepped_with_none_and_costs_no_frame() -> None:
    env = Turns(Script(ends={"agent_1": (1, "terminated")}))
    env.step(1, 1, 1)
    assert env.raw.received == [("agent_0", 1), ("agent_1", None)]
    assert env.agents("mask") == [[False], [False], [True]]
    assert env.agents("terminated") == [[False], [True], [False]]
    assert env.agents("observation")[1] == [1, 1, 0]  # its last observation
    env.step(2, 2, 2)
    assert env.raw.received[-1] == ("agent_2", 2)
    assert env.agents("observation")[1] == [0, 0, 0]
    assert env.agents("reward") == [[2], [0], [22]]
    assert env.root() == [False] * 3


def test_an_agent_may_end_with_its_own_action() -> None:
    env = Turns(Script(ends={"agent_0": (1, "truncated")}))
    env.step()
    assert env.agents("truncated") == [[True], [False], [False]]
    assert env.agents("mask") == [[False], [True], [False]]


def test_the_episode_ends_with_its_last_agent_and_all_have_final_observations() -> None:
    env = Turns(Script(max_cycles=2))
    env.step()
    env.step()
    assert env.root() == [True, False, True]
    assert env.agents("truncated") == [[True]] * 3
    assert env.agents("observation") == [[0, 2, 0], [1, 2, 0], [2, 2, 0]]
    assert env.agents("mask") == [[False]] * 3


@pytest.mark.torchrl_defect("D2b")
def test_different_reasons_make_a_truncated_root() -> None:
    ends = {"agent_0": (2, "terminated"), "agent_1": (2, "truncated")}
    env = Turns(Script(ends=ends, max_cycles=3))
    for _ in range(3):
        env.step()
    assert env.root() == [True, False, True]
    assert env.agents("terminated") == [[True], [False], [False]]


def test_done_on_any_ends_with_the_first_agent() -> None:
    env = Turns(Script(ends={"agent_1": (1, "terminated")}), done_on_any=True)
    env.step()
    assert env.root() == [True, True, False]
    assert env.agents("truncated") == [[True], [False], [True]]


def test_an_agent_that_joins_late_acts_when_it_is_its_turn() -> None:
    env = Turns(Script(joins={"agent_2": 1}))
    assert not any(env.agents("observation")[2])
    env.step()
    env.step(1, 2, 3)
    assert env.agents("mask") == [[False], [False], [True]]
    env.step(1, 2, 3)
    assert env.raw.received[-1] == ("agent_2", 3)


def test_an_agent_that_comes_back_acts_when_it_is_its_turn() -> None:
    ends = {"agent_1": (1, "terminated")}
    env = Turns(Script(ends=ends, returns={"agent_1": 3}))
    env.step()
    assert env.agents("done") == [[False], [True], [False]]
    env.step()
    assert env.agents("observation")[1] == [0, 0, 0]
    env.step()
    assert env.agents("done") == [[False]] * 3
    while env.agents("mask")[1] == [False]:
        env.step()
    env.step(1, 2, 3)
    assert env.raw.received[-1] == ("agent_1", 2)
    assert env.agents("reward")[1] == [10.0 + env.raw.steps]


def test_an_agent_that_ends_comes_back_and_acts_within_one_step_is_an_error() -> None:
    env = Turns(Script(ends={"agent_1": (1, "terminated")}))
    env.raw._was_dead_step = lambda action: env.raw.terminations.update(agent_1=False)
    with pytest.raises(RuntimeError, match="agent_1 was done, came back and became"):
        env.step()


def test_the_default_is_one_group_per_agent() -> None:
    env = PettingZooWrapper(ScriptedTurns())
    assert env.group_map == {f"agent_{i}": [f"agent_{i}"] for i in range(3)}


def test_use_mask_false_is_an_error() -> None:
    with pytest.raises(ValueError, match="use_mask"):
        PettingZooWrapper(ScriptedTurns(), use_mask=False)


def test_action_masks_are_those_of_the_agent_whose_turn_it_is() -> None:
    def info(i: int, step: int) -> dict[str, Any]:
        mask = np.ones(5, dtype=np.int8)
        mask[(i + step) % 5] = 0
        return {"action_mask": mask}

    env = Turns(Script(info=info))
    for turn in range(4):
        masks = env.row["agents", "action_mask"]
        acting = turn % 3
        assert not masks[acting, (acting + turn) % 5]
        assert masks.sum() == 14
        env.step()


@pytest.mark.parametrize(
    "script",
    [
        Script(),
        Script(ends={"agent_0": (2, "terminated"), "agent_1": (3, "truncated")}),
        Script(joins={"agent_2": 3}, ends={"agent_0": (2, "both")}),
    ],
)
@pytest.mark.parametrize("group_map", [None, IN_ONE])
def test_the_contract_holds(script: Script, group_map: Any) -> None:
    check_env(
        lambda: PettingZooWrapper(
            ScriptedTurns(script),
            group_map=group_map,
            return_state=True,
            episode_reward=True,
            agent_ids=True,
        )
    )


@pytest.mark.torchrl_defect("D2")
@pytest.mark.parametrize(
    "keywords",
    [
        {"terminate_on_fall": False, "max_cycles": 90},
        {"terminate_on_fall": False, "remove_on_fall": False, "max_cycles": 90},
        {"max_cycles": 12},
    ],
)
def test_walkers_fall_one_by_one(keywords: dict[str, Any]) -> None:
    pytest.importorskip("Box2D")
    env = PettingZooEnv("multiwalker_v9", parallel=False, **keywords)
    env.set_seed(1)
    torch.manual_seed(0)
    rollout = env.rollout(300)  # at most 90 rounds of three
    assert bool(rollout["next", "done"][-1])
    mask = [rollout[name, "mask"] for name in env.group_map]
    assert bool((sum(m.int() for m in mask) == 1).all())  # one acts in each frame


@pytest.mark.parametrize(
    "task", ["tictactoe_v3", "connect_four_v3", "leduc_holdem_v4", "texas_holdem_v4"]
)
def test_games_have_only_legal_moves(task: str) -> None:
    pytest.importorskip("pygame")
    if "holdem" in task:
        pytest.importorskip("rlcard")
    check_env(lambda: PettingZooEnv(task, parallel=False), episodes=2)
    env = PettingZooEnv(task, parallel=False)
    env.set_seed(0)
    rollout = env.rollout(100)
    rewards = [rollout["next", name, "reward"].sum() for name in env.group_map]
    assert bool(rollout["next", "terminated"][-1])
    # PettingZoo ends a game at an illegal move, with a reward of -1 for that player and
    # 0 for the other, so a sum of zero shows that all moves were legal.
    assert float(sum(rewards)) == 0
    for name in env.group_map:
        group = rollout[name]
        picked = group["action_mask"].gather(-1, group["action"].unsqueeze(-1))
        assert bool(picked.all())


def test_rows_equal_a_plain_pettingzoo_loop() -> None:
    pytest.importorskip("pygame")
    from pettingzoo.classic.connect_four import connect_four

    env = PettingZooEnv("connect_four_v3", parallel=False)
    row = allocate(env.description.row())
    env.bind(row)
    env.reset_row(5)
    raw = connect_four.env()
    raw.reset(seed=5)
    random = np.random.default_rng(0)
    for agent in raw.agent_iter():
        observation, _, terminated, truncated, _ = raw.last()
        if terminated or truncated:
            assert row["done",][0]
            assert row[agent, "terminated"][0, 0] == terminated
            observations = row[agent, "observation", "observation"][0]
            assert (observations == observation["observation"]).all()
            raw.step(None)
            continue
        assert row[agent, "mask"].all()
        observations = row[agent, "observation", "observation"][0]
        assert (observations == observation["observation"]).all()
        assert (row[agent, "action_mask"][0] == observation["action_mask"]).all()
        action = random.choice(np.flatnonzero(observation["action_mask"]))
        row[agent, "action"][0] = action
        env.step_row()
        raw.step(action)
        for other, reward in raw.rewards.items():
            assert row[other, "reward"][0, 0] == reward


def test_a_parallel_environment_of_ones_own_is_not_turn_based() -> None:
    task = "pettingzoo.sisl.multiwalker_v9:parallel_env"
    assert PettingZooEnv(task).is_parallel
    with pytest.raises(ValueError, match="builds a ParallelEnv, .* omit parallel"):
        PettingZooEnv(task, parallel=False)
