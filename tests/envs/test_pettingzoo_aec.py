"""Turn-based PettingZoo environments (AEC)."""

from typing import Any

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


def test_an_agent_that_ends_comes_back_and_acts_within_one_step_is_an_error() -> None:
    env = Turns(Script(ends={"agent_1": (1, "terminated")}))
    env.raw._was_dead_step = lambda action: env.raw.terminations.update(agent_1=False)
    with pytest.raises(RuntimeError, match="agent_1 was done, came back and became"):
        env.step()


@pytest.mark.parametrize("rotates", [False, True])
def test_an_agent_that_is_done_and_never_removed_is_an_error(*, rotates: bool) -> None:
    def ignoring() -> ScriptedTurns:
        raw = ScriptedTurns(Script(max_cycles=2))

        def ignore(_action: Any) -> None:
            if rotates:
                raw.agent_selection = "agent_1"

        raw._was_dead_step = ignore
        return raw

    env = PettingZooWrapper(ignoring())
    message = r"scripted_v0: agent agent_\d is done, .*return self._was_dead_step"
    with pytest.raises(RuntimeError, match=message):
        env.rollout(9)
    with pytest.raises(ContractError, match=message):
        check_env(lambda: PettingZooWrapper(ignoring()))


def test_an_agent_that_is_dead_after_the_reset_and_not_removed_is_an_error() -> None:
    raw = ScriptedTurns()
    reset = raw.reset

    def dead(seed: int | None = None, options: Any = None) -> None:
        reset(seed)
        raw.terminations["agent_0"] = True

    raw.reset = dead  # type: ignore[method-assign]
    raw._was_dead_step = lambda _action: None
    with pytest.raises(RuntimeError, match="agent_0 is done, but step"):
        PettingZooWrapper(raw).rollout(9)


def test_the_default_is_one_group_per_agent() -> None:
    env = PettingZooWrapper(ScriptedTurns())
    assert env.group_map == {f"agent_{i}": [f"agent_{i}"] for i in range(3)}


def test_use_mask_false_is_an_error() -> None:
    with pytest.raises(ValueError, match="use_mask"):
        PettingZooWrapper(ScriptedTurns(), use_mask=False)


def test_a_parallel_environment_of_ones_own_is_not_turn_based() -> None:
    task = "pettingzoo.sisl.multiwalker_v9:parallel_env"
    assert PettingZooEnv(task).is_parallel
    with pytest.raises(ValueError, match="builds a ParallelEnv, .* omit parallel"):
        PettingZooEnv(task, parallel=False)
