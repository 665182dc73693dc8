"""Turn-based PettingZoo environments (AEC)."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedTurns, altered
from zoo_tools import BoundEnv

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP


def in_one_group(raw: ScriptedTurns) -> BoundEnv:
    return BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE))


@pytest.mark.parametrize("first", [1, 3, 4])
def test_rewards_that_only_last_returns_are_an_error(first: int) -> None:
    raw = ScriptedTurns(Script(max_cycles=4))
    raw._accumulate_rewards = lambda: None

    def only_cumulative(_: None) -> None:
        raw._clear_rewards()
        if raw.steps >= first:
            raw._cumulative_rewards = dict.fromkeys(raw.agents, 7.0)

    env = in_one_group(altered(raw, step=only_cumulative))
    for _ in range(first - 1):
        env.step()
    message = (
        r"scripted_v0: last\(\) returns the reward 7.0 of agent_0, but env.rewards has "
        r"had only zeros so far"
    )
    with pytest.raises(RuntimeError, match=message):
        env.step()


def test_missing_rewards_are_an_error_that_names_the_environment() -> None:
    raw = ScriptedTurns()
    env = in_one_group(altered(raw, step=lambda _: delattr(raw, "rewards")))
    with pytest.raises(RuntimeError, match="scripted_v0 has no env.rewards"):
        env.step()


def test_rewards_that_last_does_not_return_are_written() -> None:
    raw = ScriptedTurns()
    raw._accumulate_rewards = lambda: None
    env = in_one_group(raw)
    env.step()
    assert env["agents", "reward"].ravel().tolist() == [1, 11, 21]


def test_check_env_compares_the_rewards_with_those_of_last() -> None:
    def factory() -> PettingZooWrapper:
        raw = ScriptedTurns()

        def add(_: None) -> None:
            if raw.steps == 2:
                raw._cumulative_rewards["agent_2"] += 5

        return PettingZooWrapper(altered(raw, step=add))

    message = (
        r"last\(\) returns the reward 48.0 of agent_2, but its rewards since its last "
        r"turn sum to 43.0"
    )
    with pytest.raises(ContractError, match=message):
        check_env(factory)


def test_an_agent_that_ends_comes_back_and_acts_within_one_step_is_an_error() -> None:
    raw = ScriptedTurns(Script(ends={"agent_1": (1, "terminated")}))
    raw._was_dead_step = lambda action: raw.terminations.update(agent_1=False)
    with pytest.raises(RuntimeError, match="agent_1 was done, came back and became"):
        in_one_group(raw).step()


@pytest.mark.parametrize("rotates", [False, True])
def test_an_agent_that_is_done_and_never_removed_is_an_error(*, rotates: bool) -> None:
    def ignoring() -> PettingZooWrapper:
        raw = ScriptedTurns(Script(max_cycles=2))

        def ignore(_action: Any) -> None:
            if rotates:
                raw.agent_selection = "agent_1"

        raw._was_dead_step = ignore
        return PettingZooWrapper(raw)

    message = r"scripted_v0: agent agent_\d is done, .*return self._was_dead_step"
    with pytest.raises(RuntimeError, match=message):
        ignoring().rollout(9)
    with pytest.raises(ContractError, match=message):
        check_env(ignoring)


def test_an_agent_that_is_dead_after_the_reset_and_not_removed_is_an_error() -> None:
    raw = ScriptedTurns()
    raw._was_dead_step = lambda _action: None
    altered(raw, reset=lambda _: raw.terminations.update(agent_0=True))
    with pytest.raises(RuntimeError, match="agent_0 is done, but step"):
        PettingZooWrapper(raw).rollout(9)


def test_a_turn_of_an_agent_that_was_removed_is_an_error() -> None:
    raw = ScriptedTurns(Script(max_cycles=9))
    altered(raw, step=lambda _: raw.terminations.pop(raw.agent_selection))
    with pytest.raises(RuntimeError, match=r"agent_1 has the turn .*no flag in env"):
        PettingZooWrapper(raw).rollout(9)


def test_an_agent_that_is_dead_after_the_reset_takes_no_part() -> None:
    raw = ScriptedTurns()

    def end(_: None) -> None:
        raw.terminations["agent_0"] = True
        raw.agent_selection = "agent_1"
        raw._deads_step_first()

    env = in_one_group(altered(raw, reset=end))
    assert env.flags("agents") == [[False] * 3] * 3
    assert env["agents", "mask"].tolist() == [False, True, False]
    env.step()
    assert env.flags("agents")[0] == [False] * 3
    assert raw.received[-1] == ("agent_1", 0)


def test_an_agent_may_join_when_another_is_removed() -> None:
    raw = ScriptedTurns(
        Script(
            joins={"agent_2": 99},
            ends={"agent_0": (1, "terminated")},
            info=lambda i, step: {"x": 10 + i},
        )
    )

    def welcome(_: None) -> None:
        raw._welcome("agent_2")
        raw.infos["agent_2"] = {"x": 7}

    altered(raw, _was_dead_step=welcome)
    env = BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE, info_keys={"x": ()}))
    env.step()
    assert env.flags("agents")[0] == [True, False, False]
    assert env["agents", "info", "x"].tolist() == [10, 11, 7]
    env.step()
    assert env["agents", "mask"].tolist() == [False, False, True]
    assert env["agents", "info", "x"].tolist() == [0, 11, 12]


def test_a_parallel_environment_of_ones_own_is_not_turn_based() -> None:
    task = "pettingzoo.sisl.multiwalker_v9:parallel_env"
    assert PettingZooEnv(task).is_parallel
    with pytest.raises(ValueError, match="builds a ParallelEnv, .* omit parallel"):
        PettingZooEnv(task, parallel=False)
