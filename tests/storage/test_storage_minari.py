"""Minari reads exports."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("h5py", reason="needs the extra minari")
pytest.importorskip("minari", reason="needs the extra minari")

import minari
import torch
from gymnasium import spaces
from storage_streams import collected, write
from support.datasets import record_here
from tensordict import TensorDict
from workloads.counting import CountingEnv, CountingOptions

from marl_collect import EnvDescription, GroupDescription, open_dataset
from marl_collect.storage import DatasetDescription, export_minari

# Minari asks for code and authors of every dataset, and leaves temporary folders.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:minari"),
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
]
same = np.array_equal


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    return tmp_path / "store"


def test_minari_reads_the_collected_data(tmp_path: Path) -> None:
    options = CountingOptions(state=True, action_mask=True)
    for seed in (4, 5):
        dataset = record_here(
            tmp_path / "d",
            lambda: CountingEnv(options),
            episodes=3,
            seed=seed,
            task="my/task",
            env_kwargs={"size": 3},
        )
    name = "mine/counting-v0"
    assert export_minari(dataset, name).is_dir()
    with pytest.raises(FileExistsError):
        export_minari(dataset, name)
    assert [*minari.list_local_datasets()] == [name]
    theirs = minari.load_dataset(name)
    assert theirs.spec.dataset_id == name
    assert theirs.spec.env_spec.kwargs == {"size": 3}
    assert theirs.spec.env_spec.id == "my_task"
    about = [*theirs.storage.get_episode_metadata(range(6))]
    assert [metadata["seed"] for metadata in about] == dataset.trajectories.seeds
    assert [metadata["run"] for metadata in about] == [0, 0, 0, 1, 1, 1]
    pairs = zip(theirs.iterate_episodes(), dataset.trajectories, strict=True)
    for episode, truth in pairs:
        assert len(episode) == len(truth)
        after = truth["next"]
        team = 0
        for group in ("hunter", "prey"):
            observation, infos = episode.observations[group], episode.infos[group]
            assert same(observation[:-1], truth[group, "observation"])
            assert same(observation[1:], after[group, "observation"])
            assert same(episode.actions[group], truth[group, "action"])
            assert same(infos["mask"][1:], after[group, "mask"])
            assert ("action_mask" in infos) == (group == "hunter")
            assert same(infos["reward"][1:], after[group, "reward"][..., 0])
            assert not infos["reward"][0].any()
            assert same(infos["terminated"][1:], after[group, "terminated"])
            team = team + after[group, "reward"].sum((1, 2))
        legal = episode.infos["hunter"]["action_mask"][:-1]
        assert same(legal, truth["hunter", "action_mask"])
        assert same(episode.observations["state"][1:], after["state"])
        assert np.allclose(episode.rewards, team)
        assert same(episode.terminations, after["terminated"][:, 0])
        assert same(episode.truncations, after["truncated"][:, 0])


def every_space() -> tuple[DatasetDescription, TensorDict]:
    """Return three episodes of two frames, with a space of each kind; there is NaN."""
    observation = spaces.Dict(
        image=spaces.Box(0, 255, (20, 16, 3), np.uint8),
        pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
        bits=spaces.MultiBinary(3),
    )
    group = GroupDescription(("a", "b"), observation, spaces.MultiDiscrete([2, 3]))
    state = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    rng, shape = np.random.default_rng(0), (3, 3, 2)
    seen: dict[tuple[str, ...], Any] = {
        ("image",): rng.integers(0, 256, (*shape, 20, 16, 3), np.uint8),
        ("pair", "0"): rng.integers(0, 3, shape),
        ("pair", "1"): rng.uniform(-1, 1, (*shape, 2)).astype(np.float32),
        ("bits",): rng.integers(0, 2, (*shape, 3), np.int8),
    }
    seen = {("g", "observation", *key): values for key, values in seen.items()}
    seen["state",] = rng.normal(size=shape) * [1, np.nan]
    batch = TensorDict({}, [3, 2])
    for key, values in seen.items():
        batch[key] = torch.from_numpy(values)[:, :-1].clone()
        batch["next", *key] = torch.from_numpy(values)[:, 1:].clone()
    batch["collector", "traj_ids"] = (torch.arange(3) << 32)[:, None].expand(3, 2)
    batch["g", "action"] = torch.from_numpy(rng.integers(0, 2, (3, 2, 2, 2)))
    batch["g", "half"] = torch.rand(3, 2, 2).bfloat16()
    rewards = torch.tensor([[[1], [0.5]], [[2], [0.5]]])
    batch["next", "g", "reward"] = rewards.expand(3, 2, 2, 1)
    done = torch.tensor([[False], [True]]).expand(3, 2, 1)
    for name in ("done", "terminated"):
        batch["next", name] = done
    batch["next", "truncated"] = done & False
    environment = EnvDescription("every", {"g": group}, {"state": state})
    return DatasetDescription("every", environment), batch


def frame_of(value: Any, t: int) -> Any:
    if isinstance(value, dict):
        return {name: frame_of(inner, t) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(frame_of(inner, t) for inner in value)
    return np.nan_to_num(value[t])


def test_minari_reads_every_space(tmp_path: Path) -> None:
    about, batch = every_space()
    write(tmp_path, [batch], about)
    selection = open_dataset(tmp_path).trajectories[1:]
    export_minari(selection, "every-v3")
    theirs = minari.load_dataset("every-v3")
    assert (theirs.total_episodes, theirs.total_steps) == (2, 4)
    for episode, truth in zip(theirs.iterate_episodes(), selection, strict=True):
        observation, after = episode.observations["g"], truth["next"]
        for name in ("image", "bits"):
            assert same(observation[name][1:], after["g", "observation", name])
        for part in (0, 1):
            expected = after["g", "observation", "pair", str(part)]
            assert same(observation["pair"][part][1:], expected)
        state = episode.observations["state"][:-1]
        assert same(state, truth["state"], equal_nan=True)
        assert same(episode.infos["g"]["half"], truth["g", "half"].float())
        assert episode.rewards.tolist() == [1.5, 2.5]
        assert theirs.action_space.contains({"g": episode.actions["g"][0]})
        for t in range(3):
            frame = frame_of(episode.observations, t)
            assert theirs.observation_space.contains(frame)


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = record_here(tmp_path / "d", CountingEnv, episodes=3).trajectories
    ends = [("next", name) for name in ("terminated", "truncated")]
    rewards = [("next", group, "reward") for group in ("hunter", "prey")]
    first = episodes.select("hunter", "prey", *ends, *rewards)
    refusals: Any = (
        (KeyError, "under 'next', so the last", first, "x-v0"),
        (KeyError, "no hunter/observation, which", episodes.select("next"), "x-v0"),
        (ValueError, "is not an id of a Minari dataset", episodes, "../counting"),
    )
    for error, message, selection, name in refusals:
        with pytest.raises(error, match=message):
            export_minari(selection, name)
    assert not store.exists()
    reports: list[tuple[int, int, int]] = []

    def stop(done: int, total: int, ended: Any) -> None:
        reports.append((done, total, len(ended)))
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_minari(episodes, "mine/counting-v0", progress=stop)
    total = int(episodes.lengths.sum())
    done = episodes.lengths.cumsum().tolist()
    assert reports == [(0, total, 0), *((n, total, 1) for n in done)]
    # HDF5 would end the process with a signal.
    free = iter([2**30, 2**24])
    usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=next(free)))
    monkeypatch.setattr("marl_collect.storage.minari.shutil", usage)
    with pytest.raises(OSError, match="The disk is full: the next episode has up to"):
        export_minari(episodes, "mine/counting-v0")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"needs h5py.*marl-collect\[minari\]"):
        export_minari(episodes, "x-v0")
    assert not list(store.iterdir())


def test_groups_that_would_be_a_file_and_its_folder_are_refused(tmp_path: Path) -> None:
    about, batches = collected(2, frames=40)
    groups = about.environment.groups
    names = {"hunter": "team", "prey": "team/red/observation"}
    for batch in batches:
        for name, other in names.items():
            batch[other] = batch.pop(name)
            batch["next", other] = batch["next"].pop(name)
    renamed = {names[name]: group for name, group in groups.items()}
    environment = replace(about.environment, groups=renamed)
    write(tmp_path / "d", batches, replace(about, environment=environment))
    with pytest.raises(ValueError, match="cannot both be in a file of Minari"):
        export_minari(open_dataset(tmp_path / "d"), "slashes-v0")
