"""Sources of action masks. No mask is ignored silently."""

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns
from zoo_tools import BoundEnv, legal, scripted

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
RAW = pytest.mark.parametrize("raw", [ScriptedEnv, ScriptedTurns])
MASKED = spaces.Dict(
    {"seen": spaces.Box(0, 99, (1,)), "action_mask": spaces.Box(0, 1, (5,), np.int8)}
)


def masked(i: int, step: int, action: Any = None) -> dict[str, Any]:
    return {"seen": np.array([step], np.float32), "action_mask": legal(i, step)}


def in_info(i: int, step: int) -> dict[str, Any]:
    return {"action_mask": legal(i, step)}


def from_step_one(i: int, step: int) -> dict[str, Any]:
    return in_info(i, step) if step else {}


@RAW
def test_a_mask_that_appears_later_is_an_error(raw: Any) -> None:
    script = Script(info=from_step_one)
    env = BoundEnv(PettingZooWrapper(raw(script), group_map=IN_ONE))
    with pytest.raises(ValueError, match=r"info of agent agent_\d.*action_mask='info'"):
        env.step()
    with pytest.raises(ContractError, match="action_mask='info'"):
        check_env(lambda: PettingZooWrapper(raw(script)))


@RAW
def test_masks_can_be_taken_from_infos(raw: Any) -> None:
    script = Script(info=from_step_one)
    keywords: dict[str, Any] = {"group_map": IN_ONE, "action_mask": "info"}
    env = BoundEnv(PettingZooWrapper(raw(script), **keywords))
    assert env["agents", "action_mask"].all()
    env.step()
    acting = env["agents", "mask"]
    expected = np.array([legal(i, 1) for i in range(3)], dtype=bool)
    assert (env["agents", "action_mask"] == expected | ~acting[:, None]).all()
    check_env(lambda: PettingZooWrapper(raw(script), **keywords))


def test_a_missing_mask_does_not_keep_the_previous_one() -> None:
    def info(i: int, step: int) -> Any:
        if step == 2:
            return {0: None, 1: {}, 2: {"action_mask": None}}[i]
        return in_info(i, step)

    env = scripted(Script(info=info))
    env.step()
    assert not env["agent", "action_mask"].all(-1).any()
    env.step()
    assert env["agent", "action_mask"].all()
    with pytest.raises(ContractError, match="agent_0 acts, but its info has no action"):
        check_env(lambda: PettingZooWrapper(ScriptedEnv(Script(info=info))))
    check_env(
        lambda: PettingZooWrapper(ScriptedEnv(Script(info=info)), action_mask="info")
    )


def test_masks_can_be_left_out() -> None:
    env = scripted(Script(info=in_info), action_mask=None)
    env.step()
    assert ("agent", "action_mask") not in env.row
    env = scripted(Script(observation=MASKED, observe=masked), action_mask=None)
    assert ("agent", "action_mask") not in env.row
    mask = env["agent", "observation", "action_mask"]
    assert mask.tolist() == [legal(i, 0).tolist() for i in range(3)]


def test_action_mask_selects_the_source_if_there_are_two() -> None:
    script = Script(observation=MASKED, observe=masked, info=lambda i, s: in_info(4, s))
    env = scripted(script, action_mask="info")
    assert (env["agent", "action_mask"] == legal(4, 0)).all()
    assert ("agent", "observation", "action_mask") in env.row
    env = scripted(script, action_mask="observation")
    assert env["agent", "action_mask"].tolist() == [
        legal(i, 0).astype(bool).tolist() for i in range(3)
    ]


def test_a_mask_in_an_observation_whose_space_has_none_is_an_error() -> None:
    space = spaces.Dict({"seen": MASKED["seen"]})
    with pytest.raises(ValueError, match="The observation of agent agent_0 has"):
        scripted(Script(observation=space, observe=masked))


def test_an_observation_without_its_mask_is_an_error() -> None:
    def observe(i: int, step: int, action: Any) -> Any:
        return {"seen": np.zeros(1)}

    with pytest.raises(
        ValueError, match="agent_0 must have the entry 'action_mask'.*'seen'"
    ):
        scripted(Script(observation=MASKED, observe=observe))


def test_agents_with_and_without_a_mask_need_different_groups() -> None:
    plain = spaces.Dict({"seen": MASKED["seen"]})
    observation: dict[str, Any] = {"agent_0": MASKED, "agent_1": plain}

    def observe(i: int, step: int, action: Any) -> Any:
        return masked(i, step) if i == 0 else {"seen": np.zeros(1)}

    script = Script(2, observation=observation, observe=observe)
    message = "an action mask in its observation.*no mask"
    with pytest.raises(ValueError, match=message):
        scripted(script, group_map=IN_ONE)
    assert len(scripted(script).env.group_map) == 2


@pytest.mark.parametrize(
    ("keywords", "script", "message"),
    [
        ({"action_mask": "infos"}, Script(), "must be one of .* but is 'infos'"),
        ({"action_mask": "observation"}, Script(), "needs Dict observation spaces"),
        (
            {"action_mask": "info"},
            Script(action=spaces.MultiDiscrete([2, 2])),
            "needs Discrete action spaces",
        ),
        (
            {},
            Script(
                action=spaces.MultiDiscrete([2, 2]), observation=MASKED, observe=masked
            ),
            "only Discrete actions can be masked.*action_mask=None",
        ),
    ],
)
def test_a_source_that_does_not_fit_is_an_error(
    keywords: dict[str, Any], script: Script, message: str
) -> None:
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        scripted(script, **keywords)


def test_a_mask_of_actions_that_are_not_discrete_is_an_error() -> None:
    script = Script(action=spaces.MultiDiscrete([2, 3]), info=in_info)
    with pytest.raises(ValueError, match="Only Discrete actions can be masked"):
        scripted(script)
    env = scripted(script, action_mask=None)
    env.step(agent=1)


@pytest.mark.parametrize("wrong", [np.ones(4), np.full(5, 2), "yes"])
def test_a_mask_that_does_not_fit_is_an_error_that_names_the_agent(wrong: Any) -> None:
    script = Script(info=lambda i, s: {"action_mask": wrong})
    with pytest.raises(ValueError, match="action_mask in info of agent agent_0"):
        scripted(script)
