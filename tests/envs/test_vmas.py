"""VMAS gives the data of its own rollout, also after worlds have begun alone."""

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vmas", reason="needs the extra vmas")

import torch
import vmas

from marl_collect import Collector, RandomPolicy, check_env
from marl_collect.core.seeding import episode_seed
from marl_collect.envs import FrameStack, VmasEnv
from marl_collect.envs.vmas.provider import FAMILY

WORLDS, FRAMES, LIMIT, SEED = 5, 40, 18, 1
DISCRETE = {"continuous_actions": False}


def collected(factory: Any, frames: int = FRAMES) -> tuple[dict[str, list[str]], Any]:
    """Return the groups, and a batch ``[K, T]`` of random actions."""
    with Collector(
        factory,
        RandomPolicy(),
        frames_per_batch=WORLDS * frames,
        total_frames=WORLDS * frames,
        seed=SEED,
    ) as collector:
        (batch,) = collector
    env = factory()
    groups = env.group_map
    env.close()
    return groups, batch


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("buzz_wire", {}),  # Its worlds end at different times.
        ("navigation", {"n_agents": 3}),
        ("simple_tag", DISCRETE),
        ("simple_reference", DISCRETE | {"multidiscrete_actions": True}),
        ("wheel", {}),  # Rewards have the shape [K, 1].
    ],
)
def test_the_data_are_those_of_the_library(
    scenario: str, options: dict[str, Any]
) -> None:
    factory = partial(VmasEnv, scenario, WORLDS, max_steps=LIMIT, **options)
    groups, batch = collected(factory)
    stock = vmas.make_env(scenario, WORLDS, seed=0, **options)
    rows = {a: (g, row) for g, names in groups.items() for row, a in enumerate(names)}
    agents = [rows[agent.name] for agent in stock.agents]
    frames = np.zeros(WORLDS, int)  # of the running episodes
    episodes = np.zeros(WORLDS, int)
    stock.seed(episode_seed(SEED, 0, 0))
    observed = stock.reset()
    ends = ended_alone = 0
    for step in range(FRAMES):
        for (group, row), observation in zip(agents, observed, strict=True):
            assert torch.equal(batch[group, "observation"][:, step, row], observation)
        actions = [batch[group, "action"][:, step, row] for group, row in agents]
        observed, rewards, terminated, _ = stock.step(
            [a if a.ndim == 2 else a[:, None] for a in actions]
        )
        frames += 1
        truncated = torch.from_numpy(frames >= LIMIT) & ~terminated
        after = batch["next"]
        for (group, row), observation, reward in zip(
            agents, observed, rewards, strict=True
        ):
            assert torch.equal(after[group, "observation"][:, step, row], observation)
            reward_row = after[group, "reward"][:, step, row, 0]
            assert torch.equal(reward_row, reward.reshape(WORLDS))
        assert torch.equal(after["terminated"][:, step, 0], terminated)
        assert torch.equal(after["truncated"][:, step, 0], truncated)
        done = np.flatnonzero(after["done"][:, step, 0].numpy()).tolist()
        episodes[done] += 1
        frames[done] = 0
        ends += len(done)
        if not done:
            continue
        stock.seed(episode_seed(SEED, done[0], int(episodes[done[0]])))
        if len(done) == WORLDS:
            observed = stock.reset()
            continue
        ended_alone += 1
        for world in done:
            observed = stock.reset_at(world)
        # It would be that of one world.
        observed = stock.get_from_scenario(
            get_observations=True, get_rewards=False, get_infos=False, get_dones=False
        )[0]
    assert ends >= WORLDS * (FRAMES // LIMIT)
    assert scenario != "buzz_wire" or ended_alone > 0


def test_every_step_draws_the_numbers_that_the_library_draws() -> None:
    # The noise is drawn for every observation.
    options: Any = {"observe_joint_angle": True, "joint_angle_obs_noise": 0.5}
    factory = partial(VmasEnv, "joint_passage", WORLDS, max_steps=LIMIT, **options)
    groups, batch = collected(factory, LIMIT)
    (group,) = groups
    stock = vmas.make_env("joint_passage", WORLDS, seed=0, **options)
    stock.seed(episode_seed(SEED, 0, 0))
    observed = stock.reset()
    assert not batch["next", "terminated"].any()
    for step in range(LIMIT):
        seen = batch[group, "observation"][:, step]
        assert torch.equal(seen, torch.stack(observed, 1))
        actions = batch[group, "action"][:, step]
        observed = stock.step(list(actions.unbind(1)))[0]


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("navigation", {}),
        ("dropout", DISCRETE),
        ("simple_world_comm", {}),
        ("simple_crypto", DISCRETE | {"multidiscrete_actions": True}),
        ("road_traffic", {"n_agents": 3}),
    ],
)
def test_check_env(scenario: str, options: dict[str, Any]) -> None:
    factory = partial(VmasEnv, scenario, 4, max_steps=5, **options)
    check_env(factory, episodes=2, steps=7)


def test_stacks_of_worlds_end_with_what_is_observed() -> None:
    plain = partial(VmasEnv, "navigation", WORLDS, max_steps=4)
    _, expected = collected(plain, 10)
    _, actual = collected(lambda: FrameStack(plain(), 3), 10)
    observed = actual["agent", "observation"]
    assert (observed[..., -1, :] == expected["agent", "observation"]).all()
    later = ~actual["next", "done"][:, :-1, 0]
    assert (observed[:, 1:, :, :-1] == observed[:, :-1, :, 1:])[later].all()


def test_groups_are_kinds_of_agents() -> None:
    env = VmasEnv("simple_tag", 2, num_good_agents=2)
    assert env.group_map == {
        "adversary": ["adversary_0", "adversary_1", "adversary_2"],
        "agent": ["agent_0", "agent_1"],
    }
    assert env.description.time_limit == 100
    assert not env.description.repeats
    env.close()
    env = VmasEnv(
        "balance", 2, group_map={"a": ["agent_0"], "b": ["agent_1"]}, n_agents=2
    )
    assert list(env.description.groups) == ["a", "b"]
    env.close()


def test_other_environments_of_the_process_draw_other_numbers() -> None:
    factory = partial(VmasEnv, "wind_flocking", WORLDS, max_steps=4)
    _, first = collected(factory, 10)
    stock = vmas.make_env("navigation", 2)
    stock.seed(8)
    expected = stock.reset()
    stock.seed(8)
    torch.manual_seed(SEED)
    state = torch.random.get_rng_state()
    _, second = collected(factory, 10)
    assert (first == second).all()
    VmasEnv("navigation", 2).begin(None, np.arange(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for observation, expected_observation in zip(stock.reset(), expected, strict=True):
        assert torch.equal(observation, expected_observation)


def test_a_world_that_begins_alone_changes_no_other() -> None:
    env = VmasEnv("navigation", 4)
    before = env.begin(None, np.arange(4))["agent"]
    after = env.begin(np.array([False, True, False, True]), np.arange(4))["agent"]
    worlds_changed = (before != after).any((1, 2))
    assert worlds_changed.tolist() == [False, True, False, True]
    env.close()


def test_arguments_that_change_what_vmas_returns_are_refused() -> None:
    with pytest.raises(TypeError, match="does not take seed, wrapper: it runs"):
        VmasEnv("navigation", 2, wrapper="gym", seed=1)
    with pytest.raises(ValueError, match="needs continuous_actions=False"):
        VmasEnv("navigation", 2, multidiscrete_actions=True)


def test_scenarios_are_found_by_name() -> None:
    tasks = FAMILY.available_tasks()
    assert {"vmas/navigation", "vmas/simple_spread"} <= tasks.keys()
    assert "vmas/het_mass" not in tasks  # for VMAS' own tests
    env = FAMILY.find_task("vmas/het_mass")(num_envs=2)
    assert env.worlds == 2
    env.close()
    assert FAMILY.settings("vmas/navigation")["num_envs"] == 32
    for task in ("vmas/nothing", "navigation"):
        with pytest.raises(ValueError, match="^$"):
            FAMILY.find_task(task)


def test_worlds_are_stepped_without_the_counters_of_autograd() -> None:
    env = VmasEnv("navigation", 2)
    env.begin(None, np.zeros(2, np.int64))
    actions = {"agent": np.zeros((2, 4, 2), np.float32)}
    env.advance(actions)
    assert all(agent.state.pos.is_inference() for agent in env._env.world.agents)
    assert not torch.is_inference_mode_enabled()
    env.close()
