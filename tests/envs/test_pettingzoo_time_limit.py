"""``time_limit=``: a limit that the environment calls a termination is a truncation."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns
from zoo_tools import BoundEnv

from marl_collect import Collector, MarlGroupMapType, RandomPolicy, check_env
from marl_collect.envs import PettingZooEnv, PettingZooWrapper

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
ALL = {f"agent_{i}": (4, "terminated") for i in range(3)}
NONE = [[False] * 3] * 3


def parallel(script: Script, **keywords: Any) -> PettingZooWrapper:
    return PettingZooWrapper(ScriptedEnv(script), group_map=IN_ONE, **keywords)


def turns(script: Script, **keywords: Any) -> PettingZooWrapper:
    return PettingZooWrapper(ScriptedTurns(script), group_map=IN_ONE, **keywords)


@pytest.mark.parametrize("done_on_any", [True, False])
def test_a_termination_at_the_limit_is_a_truncation(*, done_on_any: bool) -> None:
    script = Script(ends=ALL)
    env = BoundEnv(parallel(script, time_limit=4, done_on_any=done_on_any))
    for _ in range(3):
        env.step()
        assert env.flags("agents") == NONE
    env.step()
    assert env.flags("agents") == [[True] * 3, [False] * 3, [True] * 3]
    assert env.flags() == [[True], [False], [True]]
    assert not env["agents", "mask"].any()
    env.env.reset_row(4)  # the next episode is counted from the start
    env.step()
    assert env.flags("agents") == NONE


def test_without_a_limit_the_flags_are_those_of_the_environment() -> None:
    env = BoundEnv(parallel(Script(ends=ALL)))
    for _ in range(4):
        env.step()
    assert env.flags() == [[True], [True], [False]]


def test_only_the_frame_of_the_limit_is_changed() -> None:
    ends = {"agent_0": (2, "terminated"), "agent_1": (4, "both")}
    env = BoundEnv(parallel(Script(ends=ends), time_limit=4, done_on_any=False))
    for _ in range(4):
        env.step()
    # An agent that the environment truncates keeps both of its flags.
    terminated, truncated = [True, True, False], [False, True, True]
    assert env.flags("agents") == [[True] * 3, terminated, truncated]
    assert env.flags() == [[True], [False], [True]]


@pytest.mark.parametrize("factory", [parallel, turns])
def test_an_episode_that_goes_on_is_truncated(factory: Any) -> None:
    script = Script(max_cycles=30)
    env = BoundEnv(factory(script, time_limit=5))
    for _ in range(5):
        assert env.flags() == [[False]] * 3
        env.step()
    assert env.flags() == [[True], [False], [True]]
    check_env(partial(factory, script, time_limit=5), steps=10, episodes=2)


def test_a_turn_is_a_frame() -> None:
    ends = {f"agent_{i}": (4, "terminated") for i in range(3)}
    free, limited = (
        BoundEnv(turns(Script(ends=ends))),
        BoundEnv(turns(Script(ends=ends), time_limit=4)),
    )
    for _ in range(3):
        free.step()
        limited.step()
        assert free.flags() == limited.flags() == [[False]] * 3
    free.step()
    limited.step()
    assert free.flags("agents") == [[True] * 3, [True] * 3, [False] * 3]
    assert limited.flags("agents") == [[True] * 3, [False] * 3, [True] * 3]
    assert limited.flags() == [[True], [False], [True]]


def test_the_limit_is_in_the_description_and_in_the_data() -> None:
    pytest.importorskip("mpe2")
    factory = partial(PettingZooEnv, "simple_spread_v3", max_cycles=9, time_limit=7)
    env = factory()
    assert env.description.time_limit == 7
    env.close()
    check_env(factory, steps=10, episodes=1)
    with Collector(
        factory, RandomPolicy(), frames_per_batch=21, total_frames=21
    ) as collector:
        batch = next(iter(collector))
    expected = [[False] * 6 + [True]] * 3
    assert batch["next", "truncated"][0, :, 0].reshape(3, 7).tolist() == expected
    assert not batch["next", "terminated"].any()


def test_a_limit_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="time_limit must be at least 1, but is 0"):
        parallel(Script(), time_limit=0)


@pytest.mark.parametrize("done_on_any", [True, False])
def test_the_last_observation_of_a_cut_episode_is_that_of_the_next_turn(
    *, done_on_any: bool
) -> None:
    pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    batches = []
    for limit in (4, None):
        keywords: Any = {} if limit is None else {"time_limit": limit}
        collector = Collector(
            partial(
                PettingZooEnv,
                "tictactoe_v3",
                parallel=False,
                done_on_any=done_on_any,
                **keywords,
            ),
            frames_per_batch=4,
            total_frames=4,
            max_frames_per_traj=None if limit else 4,
            seed=0,
        )
        with collector:
            batches.append(collector.next().clone())
    batch, expected = batches
    assert expected["next", "truncated"][0, 3].all()
    assert (batch["next", "truncated"] == expected["next", "truncated"]).all()
    for group in ("player_1", "player_2"):
        name = ("next", group, "observation", "observation")
        assert (batch[name] == expected[name]).all()
    # Four moves have been made; the player whose turn is next sees all of them.
    observation = batch["next", "player_1", "observation", "observation"][0, 3]
    assert int(observation.sum()) == 4
