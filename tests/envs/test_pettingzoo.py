"""PettingZoo parallel environments: rows, masks, flags, and how they are built."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv, ScriptedTurns
from tensordict.nn import TensorDictModule
from zoo_tools import NESTED, BoundEnv, legal, nested, scripted

from marl_collect.collectors import Collector, MultiSyncCollector
from marl_collect.envs import PettingZooEnv, PettingZooWrapper
from marl_collect.testing.check_env import check_env


def test_rows_hold_what_the_environment_returns() -> None:
    env = scripted()
    assert env["agent", "observation"].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    env.step(agent=[1, 2, 3])
    assert env["agent", "observation"].tolist() == [[0, 1, 1], [1, 1, 2], [2, 1, 3]]
    assert env["agent", "reward"].ravel().tolist() == [1, 11, 21]
    assert env["agent", "mask"].all()
    assert env.flags("agent") == [[False] * 3] * 3
    assert env.flags() == [[False]] * 3


def test_an_agent_that_dies_has_a_last_observation_and_then_zeros() -> None:
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
    env.step(agent=[4, 99, 4])  # 99 is invalid, but it is not sent
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


def test_done_on_any_ends_the_episode_and_truncates_the_other_agents() -> None:
    env = scripted(Script(ends={"agent_1": (2, "terminated")}))
    env.step()
    env.step()
    assert env.flags() == [[True], [True], [False]]
    assert env.flags("agent") == [[True] * 3, [False, True, False], [True, False, True]]
    assert not env["agent", "mask"].any()


def test_done_on_any_is_true_by_default_and_can_be_chosen() -> None:
    assert PettingZooWrapper(ScriptedEnv()).description.done_on_any
    wrapper = PettingZooWrapper(ScriptedEnv(), done_on_any=False)
    assert not wrapper.description.done_on_any


def test_an_agent_that_vanishes_without_a_flag_is_truncated() -> None:
    env = scripted(Script(ends={"agent_2": (1, "vanished")}), done_on_any=False)
    env.step()
    assert env.flags("agent") == [
        [False, False, True],
        [False] * 3,
        [False, False, True],
    ]


def test_the_row_of_an_agent_is_zero_until_it_joins() -> None:
    env = scripted(Script(joins={"agent_1": 2}), agent_ids=True)
    assert env["agent", "mask"].tolist() == [True, False, True]
    assert not env["agent", "observation"][1].any()
    env.step()
    env.step()
    assert env["agent", "mask"].all()
    assert env["agent", "observation"][1].tolist() == [1, 2, 0, 0, 1, 0]
    env.step(agent=[1, 2, 3])
    assert env.env.env.received[-1] == {"agent_0": 1, "agent_1": 2, "agent_2": 3}


RETURN = Script(ends={"agent_1": (1, "terminated")}, returns={"agent_1": 3})


@pytest.mark.filterwarnings("ignore:scripted_v0. agent_1 was recorded as dead")
@pytest.mark.parametrize("reason", ["terminated", "truncated", "vanished"])
def test_an_agent_that_comes_back_acts_again(reason: str) -> None:
    script = replace(RETURN, ends={"agent_1": (1, reason)})
    env = scripted(script, done_on_any=False, agent_ids=True)
    env.step()
    assert env.flags("agent")[0] == [False, True, False]
    env.step()
    assert env["agent", "mask"].tolist() == [True, False, True]
    assert not env["agent", "observation"][1].any()
    env.step()
    assert env["agent", "mask"].all()
    assert env["agent", "observation"][1].tolist() == [1, 3, 0, 0, 1, 0]
    assert env.flags("agent") == [[False] * 3] * 3
    assert env.flags() == [[False]] * 3
    env.step(agent=[1, 2, 3])
    assert env.env.env.received[-1] == {"agent_0": 1, "agent_1": 2, "agent_2": 3}
    assert env["agent", "reward"].ravel().tolist() == [4, 14, 24]


def test_an_agent_may_end_more_than_once() -> None:
    raw = ScriptedEnv(RETURN)
    env = BoundEnv(PettingZooWrapper(raw, done_on_any=False))
    for _ in range(3):
        env.step()
    raw.script = Script(ends={"agent_1": (4, "truncated")})
    env.step()
    assert env.flags("agent")[1:] == [[False] * 3, [False, True, False]]
    env.step()
    assert not env["agent", "observation"][1].any()
    assert list(raw.received[-1]) == ["agent_0", "agent_2"]


def test_an_agent_that_is_still_listed_after_its_end_is_alive_after_the_next_step() -> (
    None
):
    """This breaks PettingZoo's rules, but the environment's data are followed."""
    raw = ScriptedEnv(replace(RETURN, returns={"agent_1": 1}))
    env = BoundEnv(PettingZooWrapper(raw, done_on_any=False))
    env.step()
    assert env.flags("agent")[0] == [False, True, False]
    env.step(agent=[0, 2, 0])
    assert env["agent", "mask"].all()
    assert env["agent", "observation"][1].tolist() == [1, 2, 2]
    assert env.flags("agent")[0] == [False] * 3


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
def test_an_agent_that_comes_back_acts_on_its_observation(kind: Any) -> None:
    def make() -> PettingZooWrapper:
        return PettingZooWrapper(ScriptedEnv(RETURN), done_on_any=False)

    def steps(observation: Any) -> Any:
        return observation[..., 1].long() % 5

    keys = [("agent", "observation")], [("agent", "action")]
    policy = TensorDictModule(steps, in_keys=keys[0], out_keys=keys[1])
    with kind(make, policy, frames_per_batch=12) as collector:
        batch = collector.next()[0]
    assert batch["agent", "mask"][:10, 1].tolist() == [True, *[False] * 2, *[True] * 7]
    assert batch["agent", "action"][:10, 1].tolist() == [0, 1, 0, 3, 4, 0, 1, 2, 3, 4]
    assert batch["next", "agent", "done"][:10, 1, 0].tolist() == [
        *[True] * 2,
        *[False] * 7,
        True,
    ]
    assert not batch["agent", "done"][3, 1]


def test_agents_may_be_listed_in_any_order() -> None:
    raw = ScriptedEnv()
    reset = raw.reset

    def reversed_reset(seed: int | None = None) -> Any:
        observations, infos = reset(seed=seed)
        raw.agents = raw.agents[::-1]
        return dict(reversed(observations.items())), infos

    raw.reset = reversed_reset  # type: ignore[method-assign, assignment]
    env = BoundEnv(PettingZooWrapper(raw))
    env.step(agent=[1, 2, 3])
    assert list(raw.received[0].items()) == [
        ("agent_2", 3),
        ("agent_1", 2),
        ("agent_0", 1),
    ]
    assert env["agent", "observation"].tolist() == [[0, 1, 1], [1, 1, 2], [2, 1, 3]]
    assert not env["done"].any()


def test_a_device_other_than_the_cpu_is_an_error_with_advice() -> None:
    PettingZooWrapper(ScriptedEnv(), device="cpu")
    with pytest.raises(ValueError, match="storing_device='cuda:0'"):
        PettingZooWrapper(ScriptedEnv(), device="cuda:0")


def test_an_episode_ends_although_an_agent_never_joined() -> None:
    ends = {"agent_0": (2, "terminated"), "agent_2": (1, "terminated")}
    script = Script(ends=ends, joins={"agent_1": 99})
    env = scripted(script, done_on_any=False)
    env.step()
    assert env.flags() == [[False]] * 3
    env.step()
    assert env.flags() == [[True], [True], [False]]


def test_an_unknown_agent_is_an_error_that_names_it() -> None:
    raw = ScriptedEnv()
    env = BoundEnv(PettingZooWrapper(raw))
    step = raw.step
    raw.step = lambda actions: ({"ghost": np.zeros(3)}, *step(actions)[1:])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"'ghost'.*possible_agents.*agent_0"):
        env.step()


def test_a_second_episode_keeps_nothing_of_the_first() -> None:
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


def test_the_seed_argument_is_in_the_description() -> None:
    assert PettingZooWrapper(ScriptedEnv(), seed=7).description.pinned_seed == 7
    assert PettingZooWrapper(ScriptedEnv()).description.pinned_seed is None


def test_render_returns_an_image_if_there_is_a_render_mode() -> None:
    env = PettingZooWrapper(ScriptedEnv(render_mode="rgb_array"))
    env.reset()
    image = env.render()
    assert image is not None
    assert image.shape == (4, 5, 3)
    assert PettingZooWrapper(ScriptedEnv()).render() is None


def test_close_may_be_called_twice() -> None:
    with PettingZooWrapper(ScriptedEnv()) as env:
        assert not env.is_closed
    env.close()
    assert env.is_closed


def test_a_class_in_place_of_an_environment_is_an_error_that_suggests_a_factory() -> (
    None
):
    with pytest.raises(
        TypeError, match=r"lambda: PettingZooWrapper\(ScriptedEnv\(\)\)"
    ):
        PettingZooWrapper(ScriptedEnv)


@pytest.mark.parametrize("env", [ScriptedEnv(), ScriptedTurns()])
def test_an_instance_in_place_of_a_factory_is_an_error_that_suggests_a_factory(
    env: Any,
) -> None:
    pytest.importorskip("torch")
    from marl_collect import Collector, RandomPolicy

    with pytest.raises(
        TypeError, match=rf"lambda: PettingZooWrapper\({type(env).__name__}"
    ):
        Collector(env, RandomPolicy(), frames_per_batch=4)
    with pytest.raises(TypeError, match=r"lambda: PettingZooEnv\('rps_v2'\)"):
        Collector("rps_v2", RandomPolicy(), frames_per_batch=4)  # type: ignore[arg-type]


def test_anything_but_an_environment_is_an_error() -> None:
    with pytest.raises(TypeError, match="ParallelEnv or AECEnv, but got 3"):
        PettingZooWrapper(3)


def test_an_environment_without_possible_agents_is_an_error() -> None:
    raw = ScriptedEnv()
    raw.possible_agents = []
    with pytest.raises(ValueError, match="possible_agents"):
        PettingZooWrapper(raw)


def test_the_task_may_be_a_module_and_a_callable() -> None:
    env = PettingZooEnv("workloads.free:FreeEnv", n_agents=2, size=5)
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


def test_rollout_of_a_custom_environment() -> None:
    env = PettingZooWrapper(ScriptedEnv(Script(max_cycles=6)))
    rollout = env.rollout(20)
    assert rollout.shape == (6,)
    assert rollout["next", "agent", "reward"].shape == (6, 3, 1)
    assert bool(rollout["next", "truncated"][-1])
