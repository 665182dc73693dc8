"""Minari reads exports."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("h5py", reason="needs the extra minari")
pytest.importorskip("minari", reason="needs the extra minari")

import minari
from formats_spaces import EverySpace
from support.datasets import record_here
from workloads.counting import CountingEnv, CountingOptions

from marl_collect.storage import export_dataset, import_dataset

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
    assert [metadata["seed"] for metadata in about] == dataset.trajectories.seeds
    pairs = zip(theirs.iterate_episodes(), dataset.trajectories, strict=True)
    for episode, truth in pairs:
        assert len(episode) == len(truth)
        after = truth["next"]
        team = 0
        for group in ("hunter", "prey"):
            observation = episode.observations[group]
            assert np.array_equal(observation[:-1], truth[group, "observation"])
            assert np.array_equal(observation[1:], after[group, "observation"])
            assert np.array_equal(episode.actions[group], truth[group, "action"])
            infos = episode.infos[group]
            assert np.array_equal(infos["mask"][1:], after[group, "mask"])
            assert ("action_mask" in infos) == (group == "hunter")
            if group == "hunter":
                legal = truth[group, "action_mask"]
                assert np.array_equal(infos["action_mask"][:-1], legal)
            assert np.array_equal(infos["reward"][1:], after[group, "reward"][..., 0])
            assert not infos["reward"][0].any()
            assert np.array_equal(infos["terminated"][1:], after[group, "terminated"])
            team = team + after[group, "reward"].sum((1, 2))
        assert np.array_equal(episode.observations["state"][1:], after["state"])
        assert np.allclose(episode.rewards, team)
        assert np.array_equal(episode.terminations, after["terminated"][:, 0])
        assert np.array_equal(episode.truncations, after["truncated"][:, 0])


def test_episodes_of_several_runs_name_theirs(tmp_path: Path) -> None:
    for seed in (4, 5):
        dataset = record_here(tmp_path / "d", CountingEnv, episodes=2, seed=seed)
    export_dataset(dataset, "mine/runs-v0", "minari")
    theirs = minari.load_dataset("mine/runs-v0")
    about = theirs.storage.get_episode_metadata(range(4))
    assert [episode["run"] for episode in about] == [0, 0, 1, 1]


def test_minari_reads_every_space(tmp_path: Path) -> None:
    dataset = record_here(tmp_path / "d", EverySpace, episodes=3, seed=1)
    selection = dataset.trajectories[1:]
    export_dataset(selection, "every-v3", "minari", compression="none")
    theirs = minari.load_dataset("every-v3")
    assert (theirs.total_episodes, theirs.total_steps) == (2, 4)
    for episode, truth in zip(theirs.iterate_episodes(), selection, strict=True):
        observation, after = (
            episode.observations["g"],
            truth["next", "g", "observation"],
        )
        assert np.array_equal(observation["image"][1:], after["image"])
        assert np.array_equal(observation["pair"][0][1:], after["pair", "0"])
        assert np.array_equal(observation["pair"][1][1:], after["pair", "1"])
        assert np.array_equal(observation["bits"][1:], after["bits"])
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


def test_the_local_store_lists_the_export(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="can be exported, but not imported"):
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
