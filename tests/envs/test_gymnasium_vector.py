"""A vector environment gives the data of separate environments, however it resets."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

pytest.importorskip("torch")

from support.torch_worlds import random_batch

from marl_collect import Collector, RandomPolicy, check_env
from marl_collect.core.batched import inner_value
from marl_collect.core.description import leaf_spaces
from marl_collect.core.seeding import episode_seed
from marl_collect.envs import GymnasiumVectorEnv

WORLDS, FRAMES, SEED = 5, 120, 3
MODES = list(AutoresetMode)


class Walk(gymnasium.Env[Any, Any]):
    """A walk between two ends, with observations and actions of several spaces.

    A task may say where it starts.
    """

    observation_space = spaces.Dict(
        {
            "at": spaces.Box(-9, 9, (2,), np.float64),
            "seen": spaces.Tuple((spaces.Discrete(30), spaces.MultiBinary(2))),
        }
    )
    action_space = spaces.Tuple(
        (spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32))
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-2, 2, 2)
        if options and "start" in options:
            self.at[:] = options["start"]
        self.frames, self.pushed = 0, np.zeros(2, np.float32)
        return self.look(), {}

    def step(self, action: Any) -> Any:
        move, push = action
        assert 1 <= move <= 3
        self.at = self.at + (move - 2) + push + self.np_random.normal(0, 0.2, 2)
        self.at = self.at - 0.5 * self.pushed
        self.pushed = push  # Not a copy: the next action must not change it.
        self.frames += 1
        outside = bool(abs(self.at).max() > 4)
        return self.look(), float(self.at[0]), outside, self.frames == 25, {}

    def look(self) -> Any:
        seen = (self.frames, (self.at > 0).astype(np.int8))
        return {"at": self.at.clip(-9, 9), "seen": seen}


class Kernels(VectorEnv[Any, Any, Any]):
    """Like EnvPool: seeded when built; a reset returns the rows of its worlds."""

    def __init__(self, mode: AutoresetMode, worlds: int = WORLDS) -> None:
        self.inner = SyncVectorEnv([Walk] * worlds, autoreset_mode=mode)
        self.inner.reset(seed=11)
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = worlds
        self.single_observation_space = Walk.observation_space
        self.single_action_space = Walk.action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert seed is None
        if options is None:
            return self.inner.reset()
        mask = options["reset_mask"].copy()
        seen, info = self.inner.reset(options={"reset_mask": mask.copy()})
        options["reset_mask"].fill(False)  # It need not stay as it was.
        kinds = seen["seen"]
        seen = {"at": seen["at"][mask], "seen": tuple(kind[mask] for kind in kinds)}
        return seen, info

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)

    def close(self, **options: Any) -> None:
        self.inner.close()


def vector(
    kind: type[Any], env: Any, mode: AutoresetMode, **options: Any
) -> GymnasiumVectorEnv:
    make = partial(gymnasium.make, env) if isinstance(env, str) else env
    return GymnasiumVectorEnv(kind([make] * WORLDS, autoreset_mode=mode, **options))


def single(env: Any) -> Any:
    return gymnasium.make(env) if isinstance(env, str) else env()


def batch_of(factory: Any, **options: Any) -> Any:
    return random_batch(factory, WORLDS * FRAMES, seed=SEED, **options)


def expect_separate(batch: Any, env: Any) -> int:
    """Play every episode of the batch in an environment of its own; count the ends."""
    ends = 0
    for k in range(WORLDS):
        other, episode = single(env), 0
        seen, _ = other.reset(seed=episode_seed(SEED, k, episode))
        frames = batch[k]
        for t in range(FRAMES):
            frame = frames[t]
            expect_seen(frame, seen, other.observation_space)
            action = frame["agent", "action"]
            if not isinstance(other.action_space, spaces.Discrete):
                move, push = (action[name][0].numpy() for name in ("0", "1"))
                chosen: Any = (move + 1, push)
            else:
                chosen = int(action[0])
            seen, reward, terminated, truncated, _ = other.step(chosen)
            after = frame["next"]
            expect_seen(after, seen, other.observation_space)
            assert after["agent", "reward"].item() == np.float32(reward)
            flags = [after[name].item() for name in ("terminated", "truncated")]
            # Where both are set, an end is no truncation.
            assert flags == [terminated, truncated and not terminated]
            if terminated or truncated:
                episode, ends = episode + 1, ends + 1
                seen, _ = other.reset(seed=episode_seed(SEED, k, episode))
    return ends


def expect_seen(frame: Any, seen: Any, space: Any) -> None:
    for path, _ in leaf_spaces(space, ()):
        stored = frame["agent", "observation", *path][0].numpy()
        expected = np.asarray(inner_value(seen, path))
        np.testing.assert_array_equal(stored, expected, str(path))


@pytest.mark.parametrize(
    ("env", "copy"), [("CartPole-v1", True), (Walk, True), (Walk, False)]
)
@pytest.mark.parametrize("mode", MODES)
def test_data_equal_separate_ones(mode: AutoresetMode, env: Any, copy: bool) -> None:
    batch = batch_of(partial(vector, SyncVectorEnv, env, mode, copy=copy))
    assert expect_separate(batch, env) > 2 * WORLDS


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES[:2])
def test_environments_in_processes_too(mode: AutoresetMode) -> None:
    batch = batch_of(partial(vector, AsyncVectorEnv, "CartPole-v1", mode))
    assert expect_separate(batch, "CartPole-v1") > 2 * WORLDS


class Counts(Walk):
    """Its action is a number from 1."""

    action_space: Any = spaces.Discrete(3, start=1)

    def step(self, action: Any) -> Any:
        return super().step((action, np.zeros(2)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", ["CartPole-v1", Walk, Counts])
def test_check_env_finds_nothing(mode: AutoresetMode, env: Any) -> None:
    make = partial(vector, SyncVectorEnv, env, mode)
    check_env(make, steps=60)
    with make() as built:
        assert built.description.repeats


@pytest.mark.parametrize("mode", MODES)
def test_worlds_begin_anew_at_a_limit_too(mode: AutoresetMode) -> None:
    make = partial(vector, SyncVectorEnv, "CartPole-v1")
    batch = batch_of(partial(make, mode), max_frames_per_traj=7)
    whole = batch_of(
        partial(vector, SyncVectorEnv, "CartPole-v1", AutoresetMode.DISABLED),
        max_frames_per_traj=7,
    )
    assert batch["next", "truncated"].any()
    assert (batch == whole).all()


@pytest.mark.parametrize("mode", MODES)
def test_simulators_that_take_no_seeds(mode: AutoresetMode) -> None:
    factory = partial(lambda: GymnasiumVectorEnv(Kernels(mode), seeds=False))
    check_env(factory, steps=60)
    batch = batch_of(factory)
    ends = batch["next", "done"][:, :-1, 0]
    assert ends.sum() > 2 * WORLDS
    clock = ("agent", "observation", "seen", "0")
    began, ended = batch[clock][:, 1:, 0], batch["next", *clock][:, :-1, 0]
    assert (began[ends] == 0).all()
    assert (ended[ends] > 0).all()
    assert (began[~ends] == ended[~ends]).all()
    # Without its own resets, a simulator plays all of its frames.
    assert (batch["next", *clock][..., 0] == batch[clock][..., 0] + 1).all()


# Its spaces are those of float64 bounds, which Gymnasium rounds.
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
def test_envpool_gives_the_data_of_single_pools() -> None:
    """Those reset in the step after an end, which is no frame here."""
    envpool = pytest.importorskip("envpool", reason="needs EnvPool")

    def pool(worlds: int, seed: int) -> Any:
        return envpool.make_gymnasium("CartPole-v1", num_envs=worlds, seed=seed)

    factory = partial(lambda: GymnasiumVectorEnv(pool(WORLDS, SEED), seeds=False))
    check_env(factory, steps=60)
    batch, ends = batch_of(factory), 0
    for k in range(WORLDS):
        other = pool(1, SEED + k)
        seen, _ = other.reset()
        for t in range(FRAMES):
            frame = batch[k, t]
            expect_seen(frame, seen[0], other.single_observation_space)
            seen, reward, *flags, _ = other.step(frame["agent", "action"].numpy())
            after = frame["next"]
            expect_seen(after, seen[0], other.single_observation_space)
            assert after["agent", "reward"].item() == reward
            assert [after[f].item() for f in ("terminated", "truncated")] == flags
            if any(flags):
                seen, *_ = other.step(np.zeros(1, np.int32))
                ends += 1
    assert ends > 2 * WORLDS


class Unmasked(SyncVectorEnv):
    """Resets all worlds, and writes into the observations that it returned."""

    def __init__(self) -> None:
        disabled = AutoresetMode.DISABLED
        super().__init__([Walk] * 4, copy=False, autoreset_mode=disabled)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        del options
        return super().reset(seed=seed)


@pytest.mark.parametrize(
    "make",
    [partial(gymnasium.make_vec, "CartPole-v1", 4, "vector_entry_point"), Unmasked],
)
def test_a_simulator_without_masked_resets_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="vectorization_mode='sync'"):
        batch_of(lambda: GymnasiumVectorEnv(make(), seeds=False))


def test_a_simulator_without_a_seed_per_world_is_told_what_to_do() -> None:
    env = GymnasiumVectorEnv(gymnasium.make_vec("CartPole-v1", 2))
    with pytest.raises(gymnasium.error.Error, match="Seed") as raised:
        env.reset()
    assert "seeds=False" in raised.value.__notes__[0]


@pytest.mark.processes
def test_a_reset_that_would_be_repeated_is_refused() -> None:
    with pytest.raises(ValueError, match="shared_memory=True"):
        vector(
            AsyncVectorEnv, "CartPole-v1", AutoresetMode.NEXT_STEP, shared_memory=False
        )


def test_an_unknown_mode_is_refused() -> None:
    env = SyncVectorEnv([Walk])
    del env.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match="autoreset_mode"):
        GymnasiumVectorEnv(env)
    assert env.closed


def test_the_page_names_every_mode() -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    assert all(f"`{mode.name}`" in page for mode in MODES)


def test_worlds_are_rendered() -> None:
    make = partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")
    env = GymnasiumVectorEnv(SyncVectorEnv([make] * 2))
    env.begin(None, np.arange(2))
    first, second = env.render(0), env.render(1)
    assert first is not None
    assert second is not None
    assert second.shape[2] == 3
    assert not np.array_equal(first, second)
    env.close()


def start(seed: int, episode: int, level: int) -> dict[str, Any]:
    return {"start": (seed % 3 - 1) + 0.1 * level + 0.01 * (episode % 5)}


@pytest.mark.parametrize("mode", MODES)
def test_each_world_is_told_its_own_task(mode: AutoresetMode) -> None:
    factory = partial(vector, SyncVectorEnv, Walk, mode)
    options: dict[str, Any] = {"seed": SEED, "curriculum": start, "level": 3}
    with Collector(
        factory, RandomPolicy(), frames_per_batch=WORLDS * 40, **options
    ) as collector:
        batches = []
        for level in (3, 7):
            collector.set_level(level)
            batches.append(collector.next().clone())
    seen = 0
    for batch in batches:
        ids, levels = batch["collector", "traj_ids"], batch["collector", "level"]
        ended = batch["next", "done"][:, :-1, 0]
        for k, t in ended.nonzero().tolist():
            episode = int(ids[k, t + 1]) % 2**32
            task = start(episode_seed(SEED, k, episode), episode, int(levels[k, t + 1]))
            at = batch["agent", "observation", "at"][k, t + 1, 0]
            assert at.tolist() == [task["start"]] * 2
            seen += 1
    assert seen > 2 * WORLDS
    firsts = batches[0]["agent", "observation", "at"][:, 0, 0, 0].tolist()
    assert firsts == [start(episode_seed(SEED, k, 0), 0, 3)["start"] for k in range(5)]
    assert {int(n) for n in batches[1]["collector", "level"].unique()} == {3, 7}
