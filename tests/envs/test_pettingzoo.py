"""PettingZoo: how environments are built, found and grouped; unusual agents."""

import re
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

pytest.importorskip("pettingzoo")

import numpy as np
from gymnasium import spaces
from support.zoo import Script, ScriptedEnv, ScriptedTurns, altered
from zoo_tools import BoundEnv, scripted

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.envs.pettingzoo.groups import AgentSpec, group_agents
from marl_collect.envs.pettingzoo.provider import find_task, settings
from marl_collect.testing.check_env import ContractError, check_env


def test_without_use_mask_there_is_no_mask_and_agents_may_die() -> None:
    env = scripted(Script(ends={"agent_0": (1, "terminated")}), use_mask=False)
    assert ("agent", "mask") not in env.row
    env.step()
    assert env["done"].all()


def test_the_seed_argument_determines_episodes_outside_collectors() -> None:
    pytest.importorskip("Box2D")
    first, second, other = (
        PettingZooEnv("multiwalker_v9", seed=seed).reset()["walker", "observation"]
        for seed in (5, 5, 6)
    )
    assert bool((first == second).all())
    assert bool((first != other).any())
    assert PettingZooWrapper(ScriptedEnv(), seed=7).description.pinned_seed == 7


def test_the_task_may_be_a_module_and_a_callable() -> None:
    env = PettingZooEnv("workloads.free:FreeEnv", n_agents=2, size=5)
    assert env.group_map == {"agent": ["agent_0", "agent_1"]}
    assert env.observation_space["agent"]["observation"].shape == (2, 5)


def test_a_group_map_has_the_agents_that_are_no_strings() -> None:
    raw: Any = ScriptedEnv()
    raw.possible_agents = [0, (0, 1), "a"]
    env = PettingZooWrapper(raw, group_map={"y": [0], "x": [(0, 1), "a"]})
    assert list(env.group_map.items()) == [("y", ["0"]), ("x", ["(0, 1)", "a"])]
    with pytest.raises(ValueError, match=r"unknown: \[7, None\]"):
        PettingZooWrapper(raw, group_map={"x": [(0, 1), "a"], "y": [0, 7, None]})


UNLIKE = Script(
    observation={
        "agent_0": spaces.Box(0, 9, (2,), np.float32),
        "agent_1": spaces.Box(0, 9, (4,), np.float32),
        "agent_2": spaces.Box(0, 9, (2,), np.float32),
    },
    observe=lambda i, step, action: np.full(4 if i == 1 else 2, i, dtype=np.float32),
)


def test_agents_of_one_prefix_with_different_spaces_get_different_groups() -> None:
    env = scripted(UNLIKE)
    assert env.env.group_map == {
        "agent_kind0": ["agent_0", "agent_2"],
        "agent_kind1": ["agent_1"],
    }
    assert env["agent_kind1", "observation"].tolist() == [[1, 1, 1, 1]]


def test_an_error_closes_what_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []

    def close(self: Any) -> None:
        closed.append(self)

    monkeypatch.setattr(ScriptedEnv, "close", close)
    wrong = {"x": ["nobody"]}
    with pytest.raises(ValueError, match="unknown"):
        PettingZooEnv("support.zoo:ScriptedEnv", group_map=wrong)
    assert len(closed) == 1
    raw = ScriptedEnv()  # Still the user's.
    with pytest.raises(ValueError, match="unknown"):
        PettingZooWrapper(raw, group_map=wrong)
    assert len(closed) == 1


def test_a_group_that_is_split_or_renamed_leaves_the_other_names_alone() -> None:
    sizes = {"a_0": 1, "a_1": 2, "a_kind0_0": 3, "a_kind0__0": 4, "collector_0": 1}
    sizes |= {"collector_agents_0": 2, "collector_agents_1": 2}
    specs = [
        AgentSpec(name, name, "", 0, spaces.Box(0, 1, (size,)), spaces.Discrete(2))
        for name, size in sizes.items()
    ]
    groups = group_agents(specs, None, parallel=True)
    assert groups == {
        "a_kind0__": ["a_0"],
        "a_kind1": ["a_1"],
        "a_kind0": ["a_kind0_0"],
        "a_kind0_": ["a_kind0__0"],
        "collector_agents_": ["collector_0"],
        "collector_agents": ["collector_agents_0", "collector_agents_1"],
    }


class Makers:
    """Callables that build environments, each with other parameters."""

    seed: Any = None
    built: ClassVar[list[PettingZooWrapper]] = []

    @staticmethod
    def plain(n_agents: int = 2) -> ScriptedEnv:
        return ScriptedEnv(Script(n_agents=n_agents))

    @staticmethod
    def any_keyword(**keywords: Any) -> ScriptedEnv:
        return Makers.plain(**keywords)

    @staticmethod
    def named(seed: int = 0) -> ScriptedEnv:
        Makers.seed = seed
        return ScriptedEnv()

    @staticmethod
    def wraps() -> PettingZooWrapper:
        Makers.built.append(PettingZooWrapper(ScriptedEnv()))
        return Makers.built[-1]

    @staticmethod
    def wraps_any(**keywords: Any) -> PettingZooWrapper:
        Makers.built.append(PettingZooWrapper(ScriptedEnv(), **keywords))
        return Makers.built[-1]


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("own_tasks")
    module.Makers, module.Env = Makers, ScriptedEnv
    monkeypatch.setitem(sys.modules, "own_tasks", module)
    Makers.built.clear()


OWN_TASKS = pytest.mark.usefixtures("own_tasks")


@OWN_TASKS
@pytest.mark.parametrize("name", ["plain", "any_keyword"])
def test_the_wrapper_takes_its_keywords(name: str) -> None:
    keywords = {"done_on_any": False, "agent_ids": True, "fast": False}
    with find_task(f"own_tasks:Makers.{name}")(n_agents=3, **keywords) as env:
        assert env.n_agents == 3
        assert not env.description.done_on_any
        assert env.observation_space["agent"]["observation"].shape == (3, 6)


@OWN_TASKS
def test_a_keyword_that_the_callable_names_is_its_own() -> None:
    with find_task("own_tasks:Makers.named")(seed=7) as env:
        assert Makers.seed == 7
        assert env.description.pinned_seed is None


@OWN_TASKS
def test_a_callable_that_wraps_takes_the_keywords_itself() -> None:
    with find_task("own_tasks:Makers.wraps_any")(done_on_any=False) as env:
        assert not env.description.done_on_any
    assert len(Makers.built) == 2
    assert all(env.is_closed for env in Makers.built)


@OWN_TASKS
def test_a_callable_that_wraps_must_name_the_keywords() -> None:
    message = (
        "own_tasks:Makers.wraps has no argument 'done_on_any', and the "
        "PettingZooWrapper that it returns takes none any more: add a parameter "
        "done_on_any to the callable"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        find_task("own_tasks:Makers.wraps")(done_on_any=False)
    assert all(env.is_closed for env in Makers.built)


@OWN_TASKS
def test_the_settings_of_a_pettingzoo_environment_include_the_wrappers() -> None:
    own = settings("own_tasks:Env")
    assert list(own)[:2] == ["script", "render_mode"]
    assert own["done_on_any"] is None
    assert own["absent"] == "dead"
    assert settings("own_tasks:Makers.wraps") == {}


@pytest.mark.roms
def test_atari() -> None:
    check_env(lambda: PettingZooEnv("pong_v3", max_cycles=20), steps=25, episodes=1)


def test_a_missing_rom_is_an_error_that_names_the_installer() -> None:
    multi_agent_ale_py = pytest.importorskip("multi_agent_ale_py")
    try:
        PettingZooEnv("pong_v3").close()
    except OSError as error:
        assert "AutoROM" in str(error)  # noqa: PT017 - no error if ROMs are installed
    assert multi_agent_ale_py is not None


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


def no_rewards(raw: Any) -> None:
    altered(raw, step=lambda _: delattr(raw, "rewards"))


def comes_back(raw: Any) -> None:
    raw._was_dead_step = lambda action: raw.terminations.update(agent_1=False)


def removes_nobody(raw: Any) -> None:
    raw._was_dead_step = lambda _: None


def rotates(raw: Any) -> None:
    raw._was_dead_step = lambda _: setattr(raw, "agent_selection", "agent_1")


def begins_dead(raw: Any) -> None:
    removes_nobody(raw)
    altered(raw, reset=lambda _: raw.terminations.update(agent_0=True))


def keeps_the_turn(raw: Any) -> None:
    altered(raw, step=lambda _: raw.terminations.pop(raw.agent_selection))


ENDS_EARLY = Script(ends={"agent_1": (1, "terminated")})
STAYS = r"scripted_v0: agent agent_\d is done, .*return self._was_dead_step"


@pytest.mark.parametrize(
    ("change", "script", "message"),
    [
        (no_rewards, Script(), "scripted_v0 has no env.rewards"),
        (comes_back, ENDS_EARLY, "agent_1 was done, came back and became"),
        (removes_nobody, Script(max_cycles=2), STAYS),
        (rotates, Script(max_cycles=2), STAYS),
        (begins_dead, Script(), "agent_0 is done, but step"),
        (keeps_the_turn, Script(), "agent_1 has the turn .*no flag in env"),
    ],
)
def test_turns_that_break_the_rules_of_pettingzoo_are_errors(
    change: Any, script: Script, message: str
) -> None:
    def factory() -> PettingZooWrapper:
        raw = ScriptedTurns(script)
        change(raw)
        return PettingZooWrapper(raw, group_map=IN_ONE)

    with pytest.raises(RuntimeError, match=message):
        factory().rollout(9)
    with pytest.raises(ContractError, match=message):
        check_env(factory)


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
