"""JaxMARL gives the data of its own rollout, also after worlds have begun alone."""

import copy
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("jaxmarl") is None:
    pytest.skip("needs jaxmarl", allow_module_level=True)

import jax
import jax.numpy as jnp
import torch
from support.torch_worlds import check_same, policy_for, random_batch

from marl_collect import check_env
from marl_collect.core.seeding import episode_seed
from marl_collect.envs import JaxMarlEnv
from marl_collect.envs.jaxmarl.provider import FAMILY

# Another process would import the library and trace its functions again, in seconds.
pytestmark = pytest.mark.xdist_group("jaxmarl")
WORLDS, SEED = 4, 3
TAG: Any = (
    "MPE_simple_tag_v3",
    {"num_obs": 1, "action_type": "Continuous", "max_steps": 8},
)
SMAX: Any = ("HeuristicEnemySMAX", {"scenario": "3m", "max_steps": 40})
# Random actions win, which ends episodes of agents that are alive.
WON: Any = (SMAX[0], SMAX[1] | {"enemy_shoots": False})
HANABI: Any = (
    "hanabi",
    # The smallest game: the usual one takes twice as long to compile.
    {"num_colors": 2, "num_ranks": 2, "hand_size": 2, "num_cards_of_rank": (2, 1)},
)
COIN_GAME: Any = ("coin_game", {"num_inner_steps": 4, "num_outer_steps": 3})


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without optimisations: compiling takes most of the time here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@cache
def built(task: str, **options: Any) -> JaxMarlEnv:
    return JaxMarlEnv(task, WORLDS, **options)


def factory_of(task: str, **options: Any) -> Callable[[], JaxMarlEnv]:
    """Return a factory of environments that share what is compiled.

    Their worlds, which each of them replaces, are all that they change.
    """
    return lambda: copy.copy(built(task, **options))


class Rollout:
    """The library's own worlds, with the keys of our episodes."""

    def __init__(self, task: str, options: dict[str, Any]) -> None:
        env = built(task, **options)._env  # So that JAX traces its functions once.
        legal = getattr(env, "get_legal_moves", env.get_avail_actions)

        def reset(seeds: Any) -> Any:
            keys = jax.vmap(lambda seed: jax.random.split(jax.random.PRNGKey(seed)))
            later, first = jnp.swapaxes(keys(seeds), 0, 1)
            return later, *jax.vmap(env.reset)(first)

        def step(keys: Any, state: Any, actions: Any) -> Any:
            later, step_keys = jnp.swapaxes(jax.vmap(jax.random.split)(keys), 0, 1)
            return later, *jax.vmap(env.step_env)(step_keys, state, actions)

        self.reset, self.step_env = jax.jit(reset), jax.jit(step)
        self.legal = jax.jit(jax.vmap(legal))
        self.running: Any = None  # keys, observations and states
        self.episodes = np.full(WORLDS, -1)
        self.begin(np.ones(WORLDS, bool))

    def begin(self, mask: Any) -> None:
        """Begin episodes in some worlds."""
        self.episodes[mask] += 1
        seeds = [episode_seed(SEED, k, int(n)) for k, n in enumerate(self.episodes)]
        new = jax.tree.map(np.asarray, self.reset(np.array(seeds, np.uint32)))
        if not mask.all():
            new = jax.tree.map(
                lambda a, b: np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b),
                new,
                self.running,
            )
        self.running = new

    @property
    def observed(self) -> Any:
        """The observations of all worlds."""
        return self.running[1]

    def legal_actions(self) -> Any:
        """Return which actions are legal."""
        return self.legal(self.running[2])

    def step(self, actions: Any) -> tuple[Any, Any]:
        """Step all worlds, and return rewards and flags."""
        keys, _, state = self.running
        keys, observed, state, rewards, dones, _ = jax.tree.map(
            np.asarray, self.step_env(keys, state, actions)
        )
        self.running = keys, observed, state
        return rewards, dones


def assert_equal(actual: Any, expected: Any, alive: Any = slice(None)) -> None:
    np.testing.assert_array_equal(actual.numpy()[alive], np.asarray(expected)[alive])


@pytest.mark.parametrize(
    ("task", "options", "frames", "limit_only"),
    [
        (*TAG, 20, True),
        (*SMAX, 100, False),
        (*WON, 100, False),
        (*HANABI, 60, False),
        ("overcooked", {"layout": "coord_ring", "max_steps": 30}, 70, True),
        ("switch_riddle", {}, 30, False),
        (*COIN_GAME, 30, True),
    ],
)
def test_the_data_are_those_of_the_library(
    task: str, options: dict[str, Any], frames: int, *, limit_only: bool
) -> None:
    env = built(task, **options)
    factory = factory_of(task, **options)
    batch = random_batch(factory, WORLDS * frames, seed=SEED)
    limit = env.description.time_limit
    rows = [
        (agent, group, row)
        for group, agents in env.group_map.items()
        for row, agent in enumerate(agents)
    ]
    masked = any(g.action_mask for g in env.description.groups.values())
    assert masked == (task in ("HeuristicEnemySMAX", "hanabi"))
    stock = Rollout(task, options)
    length = np.zeros(WORLDS, int)
    ends = n_truncated = 0
    for t in range(frames):
        root, after = batch[:, t], batch["next"][:, t]
        alive = {agent: ~root[g, "done"][:, row, 0].numpy() for agent, g, row in rows}
        legal = stock.legal_actions() if masked else {}
        for agent, group, row in rows:
            observation = root[group, "observation"][:, row]
            assert_equal(observation, stock.observed[agent], alive[agent])
            if masked:
                mask = root[group, "action_mask"][:, row]
                assert_equal(mask, legal[agent] > 0, alive[agent])
        actions = {a: root[g, "action"][:, row].numpy() for a, g, row in rows}
        rewards, dones = stock.step(actions)
        over = np.asarray(dones["__all__"])
        for agent, group, row in rows:
            reward = after[group, "reward"][:, row, 0]
            assert_equal(reward, rewards[agent].reshape(-1), alive[agent])
            done = dones[agent] | over | ~alive[agent]
            assert_equal(after[group, "done"][:, row, 0], done)
            observation = after[group, "observation"][:, row]
            assert_equal(observation, stock.observed[agent], alive[agent])
        for name in env.description.root:
            assert_equal(after[name], stock.observed["world_state"])
        assert_equal(after["done"][:, 0], over)
        length += 1
        truncated = after["truncated"][:, 0].numpy()
        assert (length[truncated] == limit).all()
        ends += over.sum()
        n_truncated += truncated.sum()
        if over.any():
            length[over] = 0
            stock.begin(over)
    assert ends >= WORLDS
    assert (n_truncated == ends) == limit_only


@pytest.mark.parametrize(("task", "options"), [TAG, SMAX, COIN_GAME])
def test_devices_change_no_data(task: str, options: dict[str, Any]) -> None:
    factories = [
        factory_of(task, **options, **more) for more in ({}, {"device": "cpu"})
    ]
    size = {"frames_per_batch": WORLDS * 20, "max_frames_per_traj": 13}
    for acts in (None, policy_for(factories[0], check_mask=False)):
        check_same(factories, acts, batches=2, **size)


def test_check_env_copies_the_tensors_of_a_device() -> None:
    task, options = TAG
    check_env(factory_of(task, **options, device="cpu"), episodes=1, steps=6)


def test_a_device_that_jax_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(platform: str) -> None:
        raise RuntimeError(f"no {platform} here")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="cuda:0, but JAX finds no gpu: no gpu here"):
        JaxMarlEnv("switch_riddle", 2, device="cuda:0")


# `scripts/environments.py jaxmarl` checks every task. Compiling them takes minutes.
@pytest.mark.parametrize(("task", "options"), [TAG, SMAX, COIN_GAME])
def test_check_env(task: str, options: dict[str, Any]) -> None:
    check_env(factory_of(task, **options), episodes=1, steps=6)


def test_a_world_that_begins_alone_compiles_nothing() -> None:
    env = factory_of("switch_riddle")()
    seeds = np.arange(4)
    env.begin(None, seeds)
    env.begin(np.array([True, False, False, True]), seeds)
    env.advance({"agent": np.zeros((4, 3), np.int64)})
    compiled: Any = (env._reset, env._renew, env._step)
    before = [function._cache_size() for function in compiled]
    for worlds in ([1], [0, 2, 3], [3]):
        mask = np.zeros(4, np.bool_)
        mask[worlds] = True
        env.begin(mask, seeds)
        env.advance({"agent": np.zeros((4, 3), np.int64)})
    assert [function._cache_size() for function in compiled] == before


def test_an_action_that_ends_an_episode_at_the_limit_terminates_it() -> None:
    env = factory_of("switch_riddle")()
    limit = env.description.time_limit
    assert limit == 6
    env.begin(None, np.arange(4))
    actions = np.zeros((4, 3), np.int64)
    for _ in range(limit - 1):
        env.advance({"agent": actions})
    actions[1] = 2  # tell
    step: Any = env.advance({"agent": actions})
    assert step.terminated["agent"].all(1).tolist() == [False, True, False, False]
    assert not step.terminated["agent"][[0, 2, 3]].any()


def test_groups_are_kinds_of_agents() -> None:
    env = JaxMarlEnv("SMAX", 2, scenario="5m_vs_6m")
    assert {name: len(agents) for name, agents in env.group_map.items()} == {
        "ally": 5,
        "enemy": 6,
    }
    assert env.description.root["state"].shape == (132,)
    env.close()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="simple_spread_v3 has no argument n_agents"):
        JaxMarlEnv("MPE_simple_spread_v3", n_agents=4)
    with pytest.raises(ValueError, match=r"no scenario '4m'. Expected one of: 3m"):
        JaxMarlEnv("SMAX", scenario="4m")
    with pytest.raises(ValueError, match="no layout 'attic'"):
        JaxMarlEnv("overcooked", layout="attic")


def test_importing_the_library_prints_nothing_and_keeps_replaced_streams(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("jaxmarl")]:
        monkeypatch.delitem(sys.modules, name)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        FAMILY.settings("jaxmarl/coin_game")
        assert (sys.stdout, sys.stderr) == (out, err)
    assert out.getvalue() + err.getvalue() + "".join(capfd.readouterr()) == ""
