"""VMAS gives the data of its own rollout, also after worlds have begun alone."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vmas", reason="needs the extra vmas")

import torch
import vmas
from support.torch_worlds import check_same, policy_for, random_batch

from marl_collect import Collector, check_env
from marl_collect.core.seeding import episode_seed
from marl_collect.envs import VmasEnv
from marl_collect.envs.vmas import env as env_module
from marl_collect.envs.vmas.env import MASKED, renew
from marl_collect.envs.vmas.provider import FAMILY

WORLDS, FRAMES, LIMIT, SEED = 5, 40, 18, 1
DISCRETE = {"continuous_actions": False}


def collected(factory: Any, frames: int = FRAMES) -> Any:
    return random_batch(factory, WORLDS * frames, seed=SEED)


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("buzz_wire", {}),  # Its worlds end at different times.
        ("navigation", {"n_agents": 3}),
        ("simple_tag", DISCRETE),
        ("simple_reference", DISCRETE | {"multidiscrete_actions": True}),
        ("wheel", {}),  # Rewards have the shape [K, 1].
        # The noise is drawn for every observation.
        ("joint_passage", {"observe_joint_angle": True, "joint_angle_obs_noise": 0.5}),
    ],
)
def test_the_data_are_those_of_the_library(
    scenario: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_module, "FEW", WORLDS)  # The library has no other way.
    factory = partial(VmasEnv, scenario, WORLDS, max_steps=LIMIT, **options)
    batch, groups = collected(factory), factory().group_map
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
    first = collected(factory, 10)
    stock = vmas.make_env("navigation", 2)
    stock.seed(8)
    expected = stock.reset()
    stock.seed(8)
    torch.manual_seed(SEED)
    state = torch.random.get_rng_state()
    second = collected(factory, 10)
    assert (first == second).all()
    VmasEnv("navigation", 2).begin(None, np.arange(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for observation, expected_observation in zip(stock.reset(), expected, strict=True):
        assert torch.equal(observation, expected_observation)


def stepped(env: Any, actions: list[torch.Tensor]) -> torch.Tensor:
    """Return what a step of VMAS gives, ``[K, D]``; its random numbers are fixed."""
    env.seed(1)
    observations, rewards, done, _ = env.step([tensor.clone() for tensor in actions])
    parts = [*leaves(observations), *rewards, done]
    return torch.cat([part.reshape(len(done), -1).double() for part in parts], 1)


def leaves(observations: Any) -> list[torch.Tensor]:
    seen = [o.values() if isinstance(o, dict) else [o] for o in observations]
    return [part for parts in seen for part in parts]


@pytest.mark.parametrize("scenario", sorted(MASKED))
def test_worlds_that_begin_together_go_on_like_those_of_a_twin(scenario: str) -> None:
    """The others go on as if nothing had happened; all bits are equal."""
    for seed in range(3):  # Some choices are made once for all worlds.
        check_renewal(scenario, seed)


def check_renewal(scenario: str, seed: int) -> None:
    env, twin = (vmas.make_env(scenario, 6, seed=s) for s in (seed, seed + 50))
    env.reset()
    for _ in range(4):
        env.step(env.get_random_actions())
    twin.reset()
    untouched, which = copy.deepcopy(env), torch.arange(6) % 3 == 0
    renew(env, copy.deepcopy(twin), which)
    for _ in range(4):
        actions = env.get_random_actions()
        actual, new, old = (stepped(e, actions) for e in (env, twin, untouched))
        assert torch.equal(actual, torch.where(which[:, None], new, old))


@pytest.mark.parametrize("scenario", ["discovery", "football", "simple_push"])
def test_worlds_of_other_scenarios_begin_as_in_the_library(scenario: str) -> None:
    """Their state is not in tensors alone, so each begins alone."""
    assert scenario not in MASKED
    env, stock = VmasEnv(scenario, 12), vmas.make_env(scenario, 12, seed=0)
    env.begin(None, np.full(12, 3))
    which = np.arange(12) % 2 == 0
    observed = env.begin(which, np.full(12, 4))
    stock.seed(3)
    stock.reset()
    stock.seed(4)
    for world in np.flatnonzero(which).tolist():
        expected = stock.reset_at(world)
    expected = stock.get_from_scenario(
        get_observations=True, get_rewards=False, get_infos=False, get_dones=False
    )[0]
    numbers = {agent.name: k for k, agent in enumerate(stock.agents)}
    for group, names in env.group_map.items():
        rows = torch.stack([expected[numbers[name]] for name in names], 1)
        assert (observed[group] == rows.numpy()).all()
    env.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("cuda", "device is cuda, but torch finds no GPU"),
        ("meta", "device is 'meta', which holds no data"),
        ("gpu", "must be a device such as 'cpu' or 'cuda:0', but is 'gpu'"),
        ("mps", "computes on 'cpu' or 'cuda'"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(device: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        VmasEnv("navigation", 2, device=device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device is cuda:2, but .* GPUs 0 to 1 only"):
        VmasEnv("navigation", 2, device="cuda:2")
    factory = partial(VmasEnv, "navigation", 2)
    with pytest.raises(ValueError, match=r"policy_device is cuda:7, but .* 0 to 1"):
        Collector(factory, frames_per_batch=2, policy_device="cuda:7")


def test_worlds_leave_gpu_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all GPUs, also those that nobody has used yet."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    env = VmasEnv("navigation", 8)
    for which in (None, np.arange(8) < 1, np.arange(8) < 4):
        env.begin(which, np.arange(8))
    assert not seeded
    env.close()


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("navigation", {"n_agents": 2}),
        ("balance", {}),
        ("dropout", DISCRETE),
        ("simple_world_comm", {}),
        ("simple_reference", {}),  # Its worlds are reset one by one.
    ],
)
def test_devices_change_no_data(scenario: str, options: dict[str, Any]) -> None:
    make = partial(VmasEnv, scenario, 8, max_steps=6, **options)
    size = {"frames_per_batch": 8 * 9, "max_frames_per_traj": 5}
    for acts in (None, policy_for(make)):
        check_same((make, partial(make, device="cpu")), acts, batches=3, **size)


@pytest.mark.accelerator
@pytest.mark.parametrize("scenario", ["navigation", "balance", "football"])
def test_worlds_on_a_gpu_repeat_and_leave_its_generator_alone(scenario: str) -> None:
    factory = partial(VmasEnv, scenario, 16, max_steps=5, device="cuda")
    check_env(factory, episodes=2, steps=7)
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    first = collected(factory, 12)
    second = collected(factory, 12)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    # Sums over many threads may differ in the last bits.
    for key in first.keys(True, True):
        assert torch.allclose(first[key].double(), second[key].double(), atol=1e-4)


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError, match="does not take seed, wrapper: collectors"):
        VmasEnv("navigation", 2, wrapper="gym", seed=1)
    with pytest.raises(TypeError, match="continuous_actions must be True or False"):
        VmasEnv("navigation", 2, continuous_actions="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_envs must be an integer of at least 1"):
        VmasEnv("navigation", 0)
    one_group: Any = "all_in_one_group"
    with pytest.raises(ValueError, match="group 'agents' must have the same spaces"):
        VmasEnv("simple_tag", 2, group_map=one_group)
    with pytest.raises(ValueError, match="needs continuous_actions=False"):
        VmasEnv("navigation", 2, multidiscrete_actions=True)


def test_scenarios_are_found_by_name() -> None:
    tasks = FAMILY.available_tasks()
    assert {"vmas/navigation", "vmas/simple_spread"} <= tasks.keys()
    assert "vmas/het_mass" not in tasks  # for VMAS' own tests
    env = FAMILY.find_task("vmas/het_mass")(num_envs=2)
    assert env.worlds == 2
    env.close()
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
