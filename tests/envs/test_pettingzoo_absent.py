"""Agents that an environment does not list although they did not end: dead or waiting.

Environments written for RLlib list in ``agents`` only those that act next. What batches
have of parallel environments is compared by the oracle.
"""

import re
import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns, altered
from zoo_tools import MASKED, BoundEnv, legal, masked

from marl_collect import Collector, MarlGroupMapType, RandomPolicy
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

torch = pytest.importorskip("torch")

LENGTH = 6
PLAYERS = ["agent_0", "agent_1", "agent_2"]
IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
TURNS = {p: [s for s in range(9) if s % 3 != i] for i, p in enumerate(PLAYERS)}
"""The steps in which each of three agents is not listed, because another one acts."""


def together(**options: Any) -> Any:
    """Return an environment that has only the observation of the next agent."""
    script: dict[str, Any] = {"waits": TURNS, "max_cycles": LENGTH} | options
    return ScriptedEnv(Script(**script))


def in_turn(**script: Any) -> Any:
    """Return an environment of turns; ``agents`` has only the one that acts next."""
    ends = dict.fromkeys(PLAYERS, (LENGTH, "terminated"))
    raw: Any = ScriptedTurns(Script(ends=ends, **script))
    step, alive = raw.step, list[str]()

    def is_over() -> bool:
        return bool(raw.terminations[raw.agent_selection])

    def list_next(_: Any = None) -> None:
        if raw.agents and not is_over():
            alive[:] = [p for p in PLAYERS if not raw.terminations.get(p, True)]
            raw.agents = [raw.agent_selection]

    def step_all(action: Any) -> None:
        raw.agents = raw.agents if is_over() else [*alive]
        step(action)
        list_next()

    raw.step = step_all
    return altered(raw, reset=list_next)


def waiting(raw: Any, **keywords: Any) -> PettingZooWrapper:
    return PettingZooWrapper(raw, group_map=IN_ONE, absent="waiting", **keywords)


@pytest.mark.parametrize("done_on_any", [None, False])
def test_players_that_are_not_listed_wait(done_on_any: Any) -> None:
    env = BoundEnv(waiting(in_turn(), done_on_any=done_on_any, agent_ids=True))
    for step in range(LENGTH):
        turn = step % 3
        assert env["agents", "mask"].tolist() == [p == turn for p in range(3)]
        assert env.flags("agents") == [[False] * 3] * 3
        assert env.flags() == [[False]] * 3
        # The last step that each player has seen, and its one-hot identity.
        seen = [
            max((s for s in range(step + 1) if s % 3 == p), default=0) for p in range(3)
        ]
        assert env["agents", "observation"][:, 1].tolist() == seen
        assert env["agents", "observation"][:, 3:].tolist() == np.eye(3).tolist()
        env.step(agents=[1, 2, 3])
        rewards = [10 * p + step + 1 for p in range(3)]
        assert env["agents", "reward"].ravel().tolist() == rewards
    actions = [(PLAYERS[s % 3], s % 3 + 1) for s in range(LENGTH)]
    assert env.env.env.received[:LENGTH] == actions
    assert env.flags() == [[True], [True], [False]]
    assert env.flags("agents") == [[True] * 3, [True] * 3, [False] * 3]
    assert env["agents", "observation"][:, 1].tolist() == [LENGTH] * 3
    assert not env["agents", "mask"].any()


@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"observation": MASKED, "observe": masked},
        {"info": lambda i, step: {"action_mask": legal(i, step)}},
    ],
    ids="-".join,
)
def test_the_contract_holds_and_actions_are_legal(masks: dict[str, Any]) -> None:
    check_env(lambda: waiting(in_turn(**masks), episode_reward=True))
    with Collector(
        lambda: waiting(in_turn(**masks)),
        RandomPolicy(),
        frames_per_batch=4 * LENGTH,
        seed=3,
    ) as collector:
        batch = collector.next()[0]
    ends = batch["next", "done"].ravel().nonzero().ravel().tolist()
    assert ends == [LENGTH - 1 + LENGTH * k for k in range(4)]
    assert batch["collector", "traj_ids"].unique().numel() == 4
    assert batch["agents", "mask"].sum(-1).tolist() == [1] * 4 * LENGTH
    if masks:
        allowed = batch["agents", "action_mask"]
        acts = batch["agents", "mask"]
        assert allowed[~acts].all()
        assert (~allowed[acts]).sum() == 4 * LENGTH
        assert allowed.gather(-1, batch["agents", "action"][..., None]).all()


@pytest.mark.parametrize("make", [together, in_turn])
def test_the_default_warns_once_that_players_come_back(make: Any) -> None:
    env = BoundEnv(PettingZooWrapper(make(), group_map=IN_ONE, done_on_any=False))
    env.step()
    env.step()
    message = (
        "scripted_v0: agent_0 was recorded as dead, because it left env.agents without "
        "a termination or truncation, but it came back. If agents that are missing "
        "only wait, pass absent='waiting'."
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        env.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            env.step()
        env.env.reset_row(4)
        for _ in range(LENGTH):
            env.step()


def test_the_default_warns_once_that_a_missing_player_ended_the_episode() -> None:
    env = BoundEnv(PettingZooWrapper(together(), group_map=IN_ONE))
    message = (
        "scripted_v0: agent_0 left env.agents without a termination or truncation, "
        "which ended the episode. If agents that are missing only wait, pass "
        "absent='waiting'."
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        env.step()
    assert env.flags() == [[True], [False], [True]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.env.reset_row(4)
        env.step()
    assert env.flags() == [[True], [False], [True]]


@pytest.mark.parametrize("done_on_any", [True, False])
def test_an_agent_that_ended_is_no_reason_to_warn(*, done_on_any: bool) -> None:
    ends = {"agent_1": (1, "terminated"), "agent_2": (2, "vanished")}
    script = Script(ends=ends, returns={"agent_1": 3}, max_cycles=4)
    env = BoundEnv(PettingZooWrapper(ScriptedEnv(script), done_on_any=done_on_any))
    for _ in range(4):
        env.step()
        if env["done"][0]:
            env.env.reset_row(0)


def test_all_actions_of_an_agent_that_waits_are_legal_whatever_is_returned() -> None:
    script = Script(observation=MASKED, observe=masked)

    def show_everybody(results: Any) -> None:
        results[0].update({p: masked(i, raw.steps) for i, p in enumerate(PLAYERS)})
        raw.agents = ["agent_1"]

    raw = altered(ScriptedEnv(script), step=show_everybody)
    env = BoundEnv(waiting(raw))
    for steps in (1, 2, 3):
        env.step(agents=[1, 1, 0])
        assert env["agents", "mask"].tolist() == [False, True, False]
        mask = env["agents", "action_mask"]
        assert mask[1].tolist() == legal(1, steps).astype(bool).tolist()
        assert mask[[0, 2]].all()
        assert env["agents", "observation", "seen"].tolist() == [[steps]] * 3


def test_an_agent_that_is_dead_after_the_reset_does_not_wait() -> None:
    raw = in_turn()

    def end(_: None) -> None:
        raw.agents = ["agent_0", "agent_1"]
        raw.terminations["agent_0"] = True
        raw._skip_agent_selection = "agent_1"

    env = BoundEnv(waiting(altered(raw, reset=end)))
    raw._accumulate_rewards = lambda: None
    env.step()
    assert env["agents", "reward"].ravel().tolist() == [0, 11, 21]


def test_an_episode_ends_when_nobody_is_listed() -> None:
    raw = together()
    env = BoundEnv(waiting(altered(raw, step=lambda _: raw.agents.clear())))
    env.step()
    assert env.flags() == [[True], [False], [True]]
    assert env.flags("agents") == [[True] * 3, [False] * 3, [True] * 3]


@pytest.mark.parametrize("absent", ["dead", "waiting"])
def test_a_reset_that_lists_nobody_is_an_error(absent: Any) -> None:
    raw = together()
    env = PettingZooWrapper(raw, group_map=IN_ONE, absent=absent)
    altered(raw, reset=lambda _: raw.agents.clear())
    message = r"scripted_v0: .* env.agents is empty. reset\(\) must begin with self.ag"
    with pytest.raises(RuntimeError, match=message):
        env.rollout(3)


@pytest.mark.parametrize("name", ["agent0", "__all__"])  # The latter is RLlib's.
def test_check_env_finds_a_flag_of_no_agent_before_it_is_true(name: str) -> None:
    def factory() -> PettingZooWrapper:
        raw = ScriptedEnv()
        spoil = lambda results: results[2].update({name: raw.steps == 4})  # noqa: E731
        return PettingZooWrapper(altered(raw, step=spoil))

    env = BoundEnv(factory())
    for _ in range(3):
        env.step()
    with pytest.raises(ValueError, match=f"a termination of '{name}', which is not"):
        env.step()
    with pytest.raises(ContractError, match=r"Step 1 of .*dict.fromkeys.self.agents"):
        check_env(factory)


def test_check_env_finds_a_flag_of_no_agent_in_turns() -> None:
    def factory() -> PettingZooWrapper:
        raw = ScriptedTurns()
        spoil = lambda _: raw.terminations.update(agent0=False)  # noqa: E731
        return PettingZooWrapper(altered(raw, reset=spoil))

    with pytest.raises(ContractError, match="a termination of 'agent0'"):
        check_env(factory)


def waits(reason: str = "vanished") -> ScriptedEnv:
    ends = {"agent_1": (2, reason)}
    return ScriptedEnv(Script(ends=ends, returns={"agent_1": 4}))


@pytest.mark.filterwarnings("ignore:scripted_v0. agent_1")
@pytest.mark.parametrize("done_on_any", [None, True, False])
def test_check_env_finds_agents_that_are_only_waiting(done_on_any: bool | None) -> None:
    factory = lambda: PettingZooWrapper(waits(), done_on_any=done_on_any)  # noqa: E731
    with pytest.raises(ContractError) as raised:
        check_env(factory)
    (finding,) = raised.value.findings
    assert "agent_1 left env.agents without a termination or truncation" in finding
    assert "Pass absent='waiting'" in finding


@pytest.mark.filterwarnings("ignore:scripted_v0. agent_1")
@pytest.mark.parametrize("done_on_any", [True, False])
def test_agents_may_leave_for_good_or_with_a_flag(done_on_any: bool) -> None:
    gone = Script(ends={"agent_1": (2, "vanished")})
    for make in (lambda: ScriptedEnv(gone), lambda: waits("terminated")):
        check_env(lambda make=make: PettingZooWrapper(make(), done_on_any=done_on_any))  # type: ignore[misc]
    check_env(
        lambda: PettingZooWrapper(waits(), absent="waiting", done_on_any=done_on_any)
    )
