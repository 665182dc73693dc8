"""Flags of unknown agents, and agents that leave without one and come back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns, altered
from zoo_tools import BoundEnv

from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

ENDS: dict[str, Callable[[bool], dict[Any, bool]]] = {
    "a misspelt name": lambda over: {"agent0": over},
    "RLlib's key": lambda over: {"__all__": over},
}


def spoiled(position: int, flags: Callable[[bool], dict[Any, bool]]) -> Any:
    """Return an environment whose flags have more keys, True in step 4."""
    raw = ScriptedEnv()
    spoil = lambda results: results[position].update(flags(raw.steps == 4))  # noqa: E731
    return altered(raw, step=spoil)


@pytest.mark.parametrize("flags", ENDS)
@pytest.mark.parametrize(("position", "name"), [(2, "termination"), (3, "truncation")])
def test_a_flag_of_no_agent_is_refused(flags: str, position: int, name: str) -> None:
    env = BoundEnv(PettingZooWrapper(spoiled(position, ENDS[flags])))
    for _ in range(3):
        env.step()
    key = next(iter(ENDS[flags](True)))
    message = f"scripted_v0: step.. returned a {name} of '{key}', which is not one of"
    with pytest.raises(ValueError, match=message):
        env.step()


@pytest.mark.parametrize("flags", ENDS)
def test_check_env_finds_a_flag_of_no_agent_in_the_first_step(flags: str) -> None:
    factory = lambda: PettingZooWrapper(spoiled(2, ENDS[flags]))  # noqa: E731
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
def test_check_env_finds_an_agent_that_waits_but_is_recorded_as_dead(
    done_on_any: bool | None,
) -> None:
    factory = lambda: PettingZooWrapper(waits(), done_on_any=done_on_any)  # noqa: E731
    with pytest.raises(ContractError) as raised:
        check_env(factory)
    (finding,) = raised.value.findings
    assert "agent_1 left env.agents without a termination or truncation" in finding
    assert "Pass absent='waiting'" in finding


@pytest.mark.filterwarnings("ignore:scripted_v0. agent_1")
@pytest.mark.parametrize("done_on_any", [True, False])
def test_an_agent_that_leaves_for_good_or_with_a_flag_is_accepted(
    done_on_any: bool,
) -> None:
    gone = Script(ends={"agent_1": (2, "vanished")})
    for make in (lambda: ScriptedEnv(gone), lambda: waits("terminated")):
        check_env(lambda make=make: PettingZooWrapper(make(), done_on_any=done_on_any))  # type: ignore[misc]
    check_env(
        lambda: PettingZooWrapper(waits(), absent="waiting", done_on_any=done_on_any)
    )


@pytest.mark.parametrize("position", [2, 3])
def test_results_of_an_agent_that_is_dead_are_ignored(position: int) -> None:
    """Some environments return those of all agents in every step."""

    def repeat(results: Any) -> None:
        results[0]["agent_1"] = np.ones(3, np.float32)
        results[1]["agent_1"] = 5.0
        results[position]["agent_1"] = True

    raw = altered(ScriptedEnv(Script(ends={"agent_1": (1, "vanished")})), step=repeat)
    env = BoundEnv(PettingZooWrapper(raw, done_on_any=False))
    env.step()
    assert env["agent", "reward"][1] == 5.0
    flags = env.flags("agent")
    assert flags[position - 1] == [False, True, False]
    for _ in range(3):
        env.step()
        assert not env["agent", "observation"][1].any()
        assert not env["agent", "reward"][1].any()
        assert env.flags("agent") == flags
