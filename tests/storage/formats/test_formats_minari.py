"""Minari reads exports, and its own datasets are imported as one agent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("h5py", reason="needs the extra minari")
pytest.importorskip("minari", reason="needs the extra minari")

import gymnasium
import minari
import torch
from formats_spaces import EverySpace
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from support.datasets import record_here

from marl_collect.storage import export_dataset, import_dataset
from marl_collect.testing.counting import CountingEnv, CountingOptions

# Minari asks for code and authors of every dataset, and leaves temporary folders.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:minari"),
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    return tmp_path / "store"


def test_minari_reads_the_collected_data(tmp_path: Path) -> None:
    options = CountingOptions(state=True, action_mask=True)
    dataset = record_here(
        tmp_path / "d", lambda: CountingEnv(options), episodes=6, seed=4
    )
    export_dataset(dataset, "mine/counting-v0", "minari")
    theirs = minari.load_dataset("mine/counting-v0")
    about = theirs.storage.get_episode_metadata(range(6))
    assert [each["seed"] for each in about] == dataset.trajectories.seeds
    pairs = zip(theirs.iterate_episodes(), dataset.trajectories, strict=True)
    for episode, truth in pairs:
        assert len(episode) == len(truth)
        after = truth["next"]
        team = 0
        for g in ("hunter", "prey"):
            seen = episode.observations[g]
            assert np.array_equal(seen[:-1], truth[g, "observation"])
            assert np.array_equal(seen[1:], after[g, "observation"])
            assert np.array_equal(episode.actions[g], truth[g, "action"])
            infos = episode.infos[g]
            assert np.array_equal(infos["mask"][1:], after[g, "mask"])
            assert ("action_mask" in infos) == (g == "hunter")
            if g == "hunter":
                legal = truth[g, "action_mask"]
                assert np.array_equal(infos["action_mask"][:-1], legal)
            assert np.array_equal(infos["reward"][1:], after[g, "reward"][..., 0])
            assert not infos["reward"][0].any()
            assert np.array_equal(infos["terminated"][1:], after[g, "terminated"])
            team = team + after[g, "reward"].sum((1, 2))
        assert np.array_equal(episode.observations["state"][1:], after["state"])
        assert np.allclose(episode.rewards, team)
        assert np.array_equal(episode.terminations, after["terminated"][:, 0])
        assert np.array_equal(episode.truncations, after["truncated"][:, 0])


def test_minari_reads_every_space(tmp_path: Path) -> None:
    dataset = record_here(tmp_path / "d", EverySpace, episodes=3, seed=1)
    chosen = dataset.trajectories[1:]
    export_dataset(chosen, "every-v3", "minari", compression="none")
    theirs = minari.load_dataset("every-v3")
    assert (theirs.total_episodes, theirs.total_steps) == (2, 4)
    for episode, truth in zip(theirs.iterate_episodes(), chosen, strict=True):
        seen, after = episode.observations["g"], truth["next", "g", "observation"]
        assert np.array_equal(seen["image"][1:], after["image"])
        assert np.array_equal(seen["pair"][0][1:], after["pair", "0"])
        assert np.array_equal(seen["pair"][1][1:], after["pair", "1"])
        assert np.array_equal(seen["bits"][1:], after["bits"])
        assert np.array_equal(
            episode.observations["state"][:-1], truth["state"], equal_nan=True
        )
        assert episode.rewards.tolist() == [1.5, 2.5]
        assert theirs.action_space.contains({"g": episode.actions["g"][0]})
        for t in range(3):
            frame = minari_frame(episode.observations, t)
            frame["state"] = np.nan_to_num(frame["state"])
            assert theirs.observation_space.contains(frame)


def minari_frame(value: Any, t: int) -> Any:
    if isinstance(value, dict):
        return {name: minari_frame(inner, t) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(minari_frame(inner, t) for inner in value)
    return value[t]


def test_the_local_store_lists_the_export(tmp_path: Path, store: Path) -> None:
    dataset = record_here(
        tmp_path / "d", CountingEnv, episodes=3, env_kwargs={"size": 3}, task="my/task"
    )
    assert export_dataset(dataset, "mine/counting-v0", "minari").is_dir()
    (name,) = minari.list_local_datasets()
    assert name == "mine/counting-v0"
    theirs = minari.load_dataset(name)
    assert theirs.spec.dataset_id == name
    assert theirs.spec.env_spec.kwargs == {"size": 3}
    assert theirs.spec.env_spec.id == "my_task"
    assert theirs.total_episodes == len(dataset.trajectories)
    with pytest.raises(FileExistsError):
        export_dataset(dataset, "mine/counting-v0", "minari")
    with pytest.raises(ValueError, match="is not an id of a Minari dataset"):
        export_dataset(dataset, "../counting", "minari")
    # An import takes an id, and the folder of a dataset outside the store.
    moved = tmp_path / "moved"
    (store / "mine" / "counting-v0" / "data").rename(moved)
    assert len(import_dataset(moved, tmp_path / "again", "minari").trajectories) == 3
    with pytest.raises(FileNotFoundError, match="no Minari dataset 'mine/counting-v0'"):
        import_dataset("mine/counting-v0", tmp_path / "other", "minari")


def test_what_minari_cannot_hold_is_an_error(tmp_path: Path, store: Path) -> None:
    dataset = record_here(tmp_path / "d", CountingEnv, episodes=2, compact_obs=True)
    with pytest.raises(KeyError, match="collected with compact_obs"):
        export_dataset(dataset, "counting-v0", "minari")
    with pytest.raises(KeyError, match="no hunter/observation, which Minari needs"):
        export_dataset(dataset.trajectories.select("next"), "counting-v0", "minari")
    with pytest.raises(ValueError, match="must be one of gzip, lzf, none"):
        export_dataset(dataset, "counting-v0", "minari", compression="zip")
    assert not list(store.iterdir())


def test_a_dataset_of_minaris_collector_becomes_one_agent(tmp_path: Path) -> None:
    env = minari.DataCollector(gymnasium.make("CartPole-v1", max_episode_steps=20))
    for seed in range(4):
        env.reset(seed=seed)
        env.action_space.seed(seed)
        for _ in range(11 + 5 * seed):  # The last episode is truncated.
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                break
    theirs = env.create_dataset("cartpole-v0", algorithm_name="random")
    env.close()
    del env
    dataset = import_dataset("cartpole-v0", tmp_path / "d", "minari")
    description = dataset.contents.description
    assert description.task == "CartPole-v1"
    assert description.environment.group_map == {"agents": ["agent_0"]}
    assert dataset.contents.runs[0].policy == {"kind": "random"}
    episodes = list(theirs.iterate_episodes())
    assert len(dataset.trajectories) == len(episodes) == 4
    for truth, found in zip(episodes, dataset.trajectories, strict=True):
        assert found.shape == (len(truth),)
        own, after = found["agents"], found["next", "agents"]
        assert np.array_equal(own["observation"][:, 0], truth.observations[:-1])
        assert np.array_equal(after["observation"][:, 0], truth.observations[1:])
        assert own["observation"].dtype == torch.float32
        assert np.array_equal(own["action"][:, 0], truth.actions)
        assert np.array_equal(after["reward"][:, 0, 0], truth.rewards)
        assert np.array_equal(found["next", "terminated"][:, 0], truth.terminations)
        assert np.array_equal(after["terminated"][:, 0, 0], truth.terminations)
        assert found["next", "done"].flatten().tolist() == [False] * (
            len(truth) - 1
        ) + [True]
        assert not found["done"].any()
    batch = dataset.transitions.sample(8)
    assert batch["agents", "observation"].shape == (8, 1, 4)


def test_a_dataset_from_buffers_keeps_nested_spaces_and_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    space = spaces.Dict(
        image=spaces.Box(0, 255, (8, 8, 3), np.uint8),
        pair=spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2,))]),
    )
    acting = spaces.Box(-1, 1, (3,))
    buffers = []
    for length in (3, 7):
        seen = {
            "image": rng.integers(0, 256, (length + 1, 8, 8, 3), np.uint8),
            "pair": (
                rng.integers(0, 4, length + 1),
                rng.uniform(-1, 1, (length + 1, 2)).astype(np.float32),
            ),
        }
        never = np.zeros(length, bool)  # Neither episode says that it ends.
        buffers.append(
            EpisodeBuffer(
                observations=seen,
                actions=rng.uniform(-1, 1, (length, 3)).astype(np.float32),
                rewards=rng.uniform(size=length),
                terminations=never,
                truncations=never,
            )
        )
    minari.create_dataset_from_buffers(
        "nested-v0", buffers, observation_space=space, action_space=acting
    )
    dataset = import_dataset("nested-v0", tmp_path / "d", "minari")
    assert (
        dataset.contents.description.environment.groups["agents"].observation == space
    )
    for truth, found in zip(buffers, dataset.trajectories, strict=True):
        seen = found["agents", "observation"]
        after = found["next", "agents", "observation"]
        for key, values in (
            ("image", truth.observations["image"]),
            (("pair", "0"), truth.observations["pair"][0]),
            (("pair", "1"), truth.observations["pair"][1]),
        ):
            assert np.array_equal(seen[key][:, 0], values[:-1])
            assert np.array_equal(after[key][:, 0], values[1:])
        assert np.array_equal(found["agents", "action"][:, 0], truth.actions)
        rewards = found["next", "agents", "reward"][:, 0, 0]
        assert np.array_equal(rewards, truth.rewards.astype(np.float32))
        assert found["next", "truncated"][-1]
        assert not found["next", "terminated"].any()


def test_an_episode_that_continues_after_its_end_is_an_error(tmp_path: Path) -> None:
    flags = np.array([False, True, False])
    buffer = EpisodeBuffer(
        observations=np.zeros((4, 1), np.float32),
        actions=np.zeros(3, np.int64),
        rewards=np.zeros(3),
        terminations=flags,
        truncations=flags,
    )
    minari.create_dataset_from_buffers(
        "broken-v0",
        [buffer],
        observation_space=spaces.Box(-1, 1, (1,)),
        action_space=spaces.Discrete(2),
    )
    with pytest.raises(ValueError, match="Episode 0 ends in its frame 1 of 3"):
        import_dataset("broken-v0", tmp_path / "d", "minari")
    assert not (tmp_path / "d").exists()


def test_a_space_without_arrays_is_an_error(tmp_path: Path) -> None:
    buffer = EpisodeBuffer(
        observations=["a", "b"],
        actions=np.zeros(1, np.int64),
        rewards=np.zeros(1),
        terminations=np.ones(1, bool),
        truncations=np.zeros(1, bool),
    )
    minari.create_dataset_from_buffers(
        "text-v0",
        [buffer],
        observation_space=spaces.Text(4),
        action_space=spaces.Discrete(2),
    )
    with pytest.raises(ValueError, match="cannot be stored: expected Box, Discrete"):
        import_dataset("text-v0", tmp_path / "d", "minari")
