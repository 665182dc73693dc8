"""Minari reads exports."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("h5py", reason="needs the extra minari")
pytest.importorskip("minari", reason="needs the extra minari")

import minari
import torch
from gymnasium import spaces
from storage_streams import write
from support.datasets import record_here
from support.scripts import run_mounted
from tensordict import TensorDict
from workloads.counting import CountingEnv, CountingOptions

from marl_collect import Collector, EnvDescription, GroupDescription, open_dataset
from marl_collect.storage import DatasetDescription, export_minari

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
    for seed in (4, 5):
        dataset = record_here(
            tmp_path / "d", lambda: CountingEnv(options), episodes=3, seed=seed
        )
    export_minari(dataset, "mine/counting-v0")
    theirs = minari.load_dataset("mine/counting-v0")
    about = [*theirs.storage.get_episode_metadata(range(6))]
    assert [metadata["seed"] for metadata in about] == dataset.trajectories.seeds
    assert [metadata["run"] for metadata in about] == [0, 0, 0, 1, 1, 1]
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
    rewards = torch.tensor([[[1], [0.5]], [[2], [0.5]]])
    batch["next", "g", "reward"] = rewards.expand(3, 2, 2, 1)
    done = torch.tensor([[False], [True]]).expand(3, 2, 1)
    for name in ("done", "terminated"):
        batch["next", name] = done
    batch["next", "truncated"] = done & False
    environment = EnvDescription("every", {"g": group}, {"state": state})
    return DatasetDescription("every", environment), batch


def test_minari_reads_every_space(tmp_path: Path) -> None:
    about, batch = every_space()
    write(tmp_path, [batch], about)
    selection = open_dataset(tmp_path).trajectories[1:]
    export_minari(selection, "every-v3")
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
    assert export_minari(dataset, "mine/counting-v0").is_dir()
    (name,) = minari.list_local_datasets()
    assert name == "mine/counting-v0"
    theirs = minari.load_dataset(name)
    assert theirs.spec.dataset_id == name
    assert theirs.spec.env_spec.kwargs == {"size": 3}
    assert theirs.spec.env_spec.id == "my_task"
    assert theirs.total_episodes == len(dataset.trajectories)
    with pytest.raises(FileExistsError):
        export_minari(dataset, "mine/counting-v0")
    with pytest.raises(ValueError, match="is not an id of a Minari dataset"):
        export_minari(dataset, "../counting")


def test_what_minari_cannot_hold_is_an_error(tmp_path: Path, store: Path) -> None:
    dataset = record_here(tmp_path / "d", CountingEnv, episodes=2)
    ends = [("next", name) for name in ("terminated", "truncated")]
    rewards = [("next", group, "reward") for group in ("hunter", "prey")]
    first = dataset.trajectories.select("hunter", "prey", *ends, *rewards)
    with pytest.raises(KeyError, match="under 'next', so the last"):
        export_minari(first, "counting-v0")
    with pytest.raises(KeyError, match="no hunter/observation, which Minari needs"):
        export_minari(dataset.trajectories.select("next"), "counting-v0")
    assert not store.exists()


def test_an_export_that_stops_leaves_nothing(tmp_path: Path, store: Path) -> None:
    dataset = record_here(tmp_path / "d", CountingEnv, episodes=3)
    lengths = dataset.trajectories.lengths
    reports: list[tuple[int, int, int]] = []

    def stop(done: int, total: int, ended: Any) -> None:
        reports.append((done, total, len(ended)))
        if done == total:
            raise KeyboardInterrupt

    store.mkdir()
    with pytest.raises(KeyboardInterrupt):
        export_minari(dataset, "mine/counting-v0", progress=stop)
    total = int(lengths.sum())
    done = lengths.cumsum().tolist()
    assert reports == [(0, total, 0), *((n, total, 1) for n in done)]
    assert not list(store.iterdir())


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = record_here(tmp_path / "d", CountingEnv, episodes=1)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"needs h5py.*marl-collect\[minari\]"):
        export_minari(dataset, "x-v0")
    assert not store.exists()


FULL = """
import os, sys
os.environ["MINARI_DATASETS_PATH"] = os.path.abspath("small/store")
from marl_collect import open_dataset
from marl_collect.storage import export_minari
data = open_dataset(sys.argv[1])
try:
    export_minari(data, "x-v0")
except OSError as error:
    print(error, os.listdir("small/store"))
"""


@pytest.mark.processes
@pytest.mark.mounts
def test_an_export_to_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """HDF5 would end the process with a signal."""
    options = CountingOptions(image=(40, 44, 3))
    record_here(tmp_path / "d", lambda: CountingEnv(options), episodes=200)
    (tmp_path / "small").mkdir()
    process = run_mounted("small", FULL, "d", mebibytes=16, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "The disk is full: the next episode has up to" in process.stdout
    assert process.stdout.endswith("[]\n")


def test_bfloat16_is_exported_as_float32(tmp_path: Path) -> None:
    batch = Collector(CountingEnv, frames_per_batch=60, seed=0).next().clone()
    batch["hunter", "extra"] = torch.rand(*batch.shape, 2, 3).bfloat16()
    about = DatasetDescription("counting", CountingEnv().description)
    write(tmp_path / "d", [batch], about)
    dataset = open_dataset(tmp_path / "d")
    export_minari(dataset, "x-v0")
    pairs = zip(
        minari.load_dataset("x-v0").iterate_episodes(),
        dataset.trajectories,
        strict=True,
    )
    for episode, truth in pairs:
        extra = episode.infos["hunter"]["extra"]
        assert np.array_equal(extra, truth["hunter", "extra"].float())
