"""PettingZoo: arguments, spaces and results that do not fit are refused by name."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from support.disguises import contained
from support.zoo import Script, ScriptedEnv, ScriptedTurns, altered
from workloads.free import FreeEnv
from zoo_tools import MASKED, NESTED, BoundEnv, legal, masked, nested

from marl_collect import MarlGroupMapType
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

Case = tuple[Script, dict[str, Any], str]
"""What is wrapped, with which keywords, and the words of the error."""
IN_ONE: dict[str, Any] = {"group_map": MarlGroupMapType.ALL_IN_ONE_GROUP}
KINDS = pytest.mark.parametrize("kind", [ScriptedEnv, ScriptedTurns])
BOX = spaces.Box(0, 1, (2,))
IMAGE = spaces.Box(0, 255, (2, 2), np.uint8)
PAIR = spaces.MultiDiscrete([2, 2])
SEEN = spaces.Dict(seen=MASKED["seen"])
SMALL = spaces.Box(-100, 100, (3,), np.int8)
LONG = spaces.Box(-1, 99, (3,), np.dtype(np.longdouble))
UNEQUAL: Any = {a: spaces.Discrete(i + 2) for i, a in enumerate(Script().agents)}
UNLIKE: Any = {f"agent_{i}": spaces.Box(0, 9, (n,)) for i, n in enumerate((2, 4, 2))}
HALF_MASKED: Any = {"agent_0": MASKED, "agent_1": SEEN}
ZEROS = np.zeros(3, np.int8)
NO_PAIR = {k: v for k, v in nested(0, 0, None).items() if k != "pair"}


def half_masked(i: int, step: int, action: Any) -> Any:
    return {"seen": np.zeros(1)} if i else masked(i, step)


def shown(value: Any, words: str, observation: Any = None, **keywords: Any) -> Case:
    """Every observation is ``value``."""
    space = {} if observation is None else {"observation": observation}
    return Script(observe=lambda *_: value, **space), keywords, words


def informed(info: Any, words: str, action: Any = PAIR, **keywords: Any) -> Case:
    """Every info is ``info``."""
    return Script(action=action, info=lambda *_: info), keywords, words


def plain(words: str, **keywords: Any) -> Case:
    return Script(), keywords, words


def with_masks(*masks: Any) -> list[Case]:
    words, five = "action_mask in info of agent agent_0", spaces.Discrete(5)
    return [informed({"action_mask": mask}, words, five) for mask in masks]


VALUES: list[Case] = [
    shown(np.zeros(4), r"observation of agent agent_0 .*\(3,\).*\(4,\)"),
    shown(np.zeros(1), r"\(3,\).*\(1,\)"),
    shown([[0.0], [1.0, 2.0]], "must be an array of numbers"),
    shown("text", "must be an array of numbers of shape .*'text'"),
    shown({"a": 1}, r"a dict with the keys \['a'\]"),
    shown(np.full(3, 200), "agent_0 .*int8 .*value 200 of dtype int64", SMALL),
    shown(np.full((2, 2), 0.5), "agent_0 must fit the dtype uint8.*float64", IMAGE),
    shown(np.full((2, 2), 200), "agent_ids", IMAGE, agent_ids=True),
    shown(NO_PAIR, "agent_0 must have the entry 'pair'", NESTED),
    shown(masked(0, 0), "The observation of agent agent_0 has", SEEN),
    shown({"seen": [0]}, "must have the entry 'action_mask'.*'seen'", MASKED),
    (
        Script(2, observation=HALF_MASKED, observe=half_masked),
        *(IN_ONE, "an action mask in its observation.*no mask"),
    ),
    plain("must be one of .* but is 'infos'", action_mask="infos"),
    plain("needs Dict observation spaces", action_mask="observation"),
    informed({}, "needs Discrete action spaces", action_mask="info"),
    informed({"action_mask": np.ones(4)}, "Only Discrete actions can be masked"),
    (
        Script(action=PAIR, observation=MASKED, observe=masked),
        *({}, "only Discrete actions can be masked.*action_mask=None"),
    ),
    *with_masks(np.ones(4), np.full(5, 2), "yes"),
    (Script(observation=UNLIKE), IN_ONE, "agent_0.*group_map="),
    (Script(action=UNEQUAL), {"group_map": {"x": Script().agents}}, "in Discrete.2"),
    plain("must be one of .*'one_group_per_agent'", group_map="agents"),
    plain("time_limit must be at least 1, but is 0", time_limit=0),
    plain("absent must be 'dead' or 'waiting', but is", absent="asleep"),
    plain("storing_device='cuda:0'", device="cuda:0"),
]
TYPES: list[Case] = [
    shown(ZEROS, "which torch does not have", LONG),
    informed({"no": "hi"}, "'no' of agent agent_0.*'hi'", info_keys=["no"]),
    plain("must be a mapping from group to agents", group_map=["agent_0"]),
    plain("must be a mapping from group to agents", group_map=3),
    plain("info_keys must be names, but one of them is 1", info_keys=(1,)),
    plain("done_on_any must be True or False or None, but is 'no'", done_on_any="no"),
    plain("repeats must be True or False, but is 'no'", repeats="no"),
    plain("fast must be True or False, but is 'no'", fast="no"),
    plain("time_limit must be an integer or None, but is 2.5", time_limit=2.5),
]


@KINDS
@pytest.mark.parametrize(
    ("error", "case"),
    [*((ValueError, case) for case in VALUES), *((TypeError, case) for case in TYPES)],
)
def test_what_does_not_fit_is_refused_before_the_first_step(
    kind: Any, error: type[Exception], case: Case
) -> None:
    script, keywords, words = case
    with pytest.raises(error, match=re.compile(words, re.DOTALL)):
        BoundEnv(PettingZooWrapper(kind(script), **keywords))


def test_agents_with_and_without_a_mask_get_different_groups() -> None:
    script = Script(2, observation=HALF_MASKED, observe=half_masked)
    assert len(PettingZooWrapper(ScriptedEnv(script)).group_map) == 2


def test_waiting_needs_a_mask() -> None:
    with pytest.raises(ValueError, match=r"scripted_v0: absent='waiting' needs use"):
        PettingZooWrapper(ScriptedEnv(), absent="waiting", use_mask=False)


def test_what_is_no_environment_or_task_is_an_error_with_advice() -> None:
    advice = r"lambda: PettingZooWrapper\("
    for wrong, words in (
        (3, "ParallelEnv or AECEnv, but got 3"),
        (ScriptedEnv, advice),
    ):
        with pytest.raises(TypeError, match=words):
            PettingZooWrapper(wrong)
    with pytest.raises(TypeError, match=f"name, .* {advice}"):
        PettingZooEnv(ScriptedEnv)  # type: ignore[arg-type]
    nobody = ScriptedEnv()
    nobody.possible_agents = []
    with pytest.raises(ValueError, match="possible_agents"):
        PettingZooWrapper(nobody)


@KINDS
@pytest.mark.parametrize(
    ("state", "space"),
    [
        *[({"a": np.zeros(2)}, space) for space in (spaces.Dict(a=BOX), None)],
        ((np.zeros(2),), spaces.Tuple([BOX])),
        *[(state, None) for state in ([[1], [1, 2]], None, "text", np.array([1j]))],
    ],
)
def test_states_of_several_arrays_are_refused(
    kind: Any, state: Any, space: Any
) -> None:
    env = kind()
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
    pytest.importorskip("pettingzoo.classic")
    with pytest.raises(ValueError, match=r"with state\(\), but that of rps_v2 raised"):
        PettingZooEnv("rps_v2", return_state=True)


@KINDS
@pytest.mark.parametrize(
    "container", [set, iter, ",".join, lambda names: np.array([names]), lambda _: None]
)
def test_agents_without_order_or_name_are_refused(kind: Any, container: Any) -> None:
    with pytest.raises(ValueError, match="scripted_v0 must have a list possible_agent"):
        PettingZooWrapper(contained(kind(), container))


@KINDS
@pytest.mark.parametrize("missing", [None, 3])
def test_agents_that_are_no_sequence_are_an_error(kind: Any, missing: Any) -> None:
    wrapped = contained(kind(), list)
    env = PettingZooWrapper(wrapped)
    wrapped.container = lambda _: missing
    with pytest.raises(TypeError, match="scripted_v0: env.agents must be a list of"):
        BoundEnv(env)


def changed(index: int, **values: Any) -> Callable[[Any], Any]:
    """Return a change of one of the five results of a step."""
    return lambda results: results[index].update(values)


def rewarded(value: Any) -> tuple[Any, str]:
    return changed(1, agent_1=value), "The reward of agent agent_1 must be a numb"


def instead(value: Any) -> tuple[Any, str]:
    return lambda _: value, "scripted_v0: step.. must return five mapping"


def flagged(index: int, name: str) -> tuple[Any, str]:
    kind = "termination" if index == 2 else "truncation"
    words = f"step.. returned a {kind} of '{name}', which is not one of"
    return changed(index, **{name: True}), f"scripted_v0: {words}"


GHOST = r"'ghost', which is not one.*agent_0"
OF_STEPS: list[tuple[Callable[[Any], Any], str]] = [
    *map(rewarded, [None, "2", np.ones(2), [1.0], 1j, 10**400]),
    *[(changed(0, ghost=np.zeros(3)), GHOST), (changed(1, ghost=0.0), GHOST)],
    *[flagged(index, name) for index in (2, 3) for name in ("agent0", "__all__")],
    *map(instead, [(), ({}, {}, {}, {}), 3, ({}, {}, None, {}, {})]),
    *map(instead, [({}, {}, {}, {}, None), ([], {}, {}, {}, {}), ({}, [], {}, {}, {})]),
    (
        changed(4, agent_1={"action_mask": np.ones(5)}),
        r"info of agent agent_\d.*action_mask='info'",
    ),
    (changed(0, agent_0=np.full(3, 200)), "agent_0 .*int8 .*value 200 of dtype int64"),
]


@pytest.mark.parametrize(("change", "words"), OF_STEPS)
def test_wrong_results_of_a_step_are_named(change: Any, words: str) -> None:
    script, *_ = shown(ZEROS, "", SMALL)
    raw = altered(ScriptedEnv(script), step=change)
    env = BoundEnv(PettingZooWrapper(raw))
    with pytest.raises((TypeError, ValueError), match=words):
        env.step()


def test_a_step_that_returns_nothing_is_named() -> None:
    raw = ScriptedEnv()
    env = BoundEnv(PettingZooWrapper(raw))
    raw.step = lambda _: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(TypeError, match="scripted_v0: step.. must return five mapping"):
        env.step()


def test_a_reward_without_those_of_others_is_checked_too() -> None:
    only = lambda results: (results[0], {"agent_1": "2"}, *results[2:])  # noqa: E731
    env = BoundEnv(PettingZooWrapper(altered(ScriptedEnv(), step=only)))
    with pytest.raises(ValueError, match="The reward of agent agent_1 must be a numb"):
        env.step()


@KINDS
def test_a_mask_that_appears_later_is_an_error(kind: Any) -> None:
    script = Script(
        info=lambda i, step: {"action_mask": legal(i, step)} if step else {}
    )
    env = BoundEnv(PettingZooWrapper(kind(script), **IN_ONE))
    with pytest.raises(ValueError, match=r"info of agent agent_\d.*action_mask='info'"):
        env.step()
    with pytest.raises(ContractError, match="action_mask='info'"):
        check_env(lambda: PettingZooWrapper(kind(script)))


def test_a_state_whose_shape_changes_is_an_error() -> None:
    raw = ScriptedEnv()
    raw.state = lambda: np.zeros(2 + raw.steps)  # type: ignore[method-assign]
    env = BoundEnv(PettingZooWrapper(raw, return_state=True))
    with pytest.raises(ValueError, match=r"^state must have the shape \(2,\)"):
        env.step()


@KINDS
@pytest.mark.parametrize(
    "keywords", [{}, {"info_keys": ["speed"]}, {"action_mask": "info"}]
)
@pytest.mark.parametrize("info", [np.ones(2), [1], 3, "text"])
def test_infos_that_are_no_dicts_are_named(kind: Any, keywords: Any, info: Any) -> None:
    message = "scripted_v0: the info of agent agent_0 must be a dict, but is"
    script = Script(info=lambda *_: info)
    with pytest.raises(TypeError, match=message):
        BoundEnv(PettingZooWrapper(kind(script), **IN_ONE, **keywords))
    later = altered(ScriptedEnv(), step=changed(4, agent_0=info))
    env = BoundEnv(PettingZooWrapper(later, **IN_ONE))
    with pytest.raises(TypeError, match=message):
        env.step()
