"""h5py and Minari read the dataset's episodes from an export."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("h5py", reason="needs the extra hdf5")
pytest.importorskip("minari", reason="needs the extra dev")

import h5py
import minari
from gymnasium import spaces

from marl_collect import Collector, record
from marl_collect.cli.tasks import find_factory
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.env import MultiAgentEnv
from marl_collect.core.flags import Flags
from marl_collect.storage import (
    DatasetDescription,
    Writer,
    export_hdf5,
    open_dataset,
)
from marl_collect.storage.export_formats import export
from marl_collect.storage.files import size_of
from marl_collect.testing.counting import CountingEnv


class EverySpace(MultiAgentEnv):
    """Two steps of one agent, with a space of each kind."""

    description = EnvDescription(
        "every",
        {
            "g": GroupDescription(
                ("a", "b"),
                spaces.Dict(
                    image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
                    pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
                    bits=spaces.MultiBinary(3),
                ),
                spaces.MultiDiscrete([2, 3]),
            )
        },
        {"state": spaces.Box(-np.inf, np.inf, (2,), np.float64)},
    )
    is_closed = False

    def bind(self, row):
        self.row = row
        self.flags = Flags(row, self.description)

    def reset_row(self, seed):
        self.random = np.random.default_rng(seed)
        self.steps = 0
        self.flags.clear()
        self.observe()

    def step_row(self):
        self.steps += 1
        self.row["g", "reward"][:, 0] = [self.steps, 0.5]
        if self.steps == 2:
            self.flags.end_all(terminated=True, truncated=False)
        self.observe()

    def observe(self):
        row = self.row
        row["state",][...] = self.random.normal(size=2)
        row["g", "observation", "image"][...] = self.random.integers(
            0, 256, (2, 4, 4, 3)
        )
        row["g", "observation", "pair", "0"][...] = self.random.integers(0, 3, 2)
        row["g", "observation", "pair", "1"][...] = self.random.uniform(-1, 1, (2, 2))
        row["g", "observation", "bits"][...] = self.random.integers(0, 2, (2, 3))
        row["g", "mask"][...] = True

    def render(self):
        return None

    def close(self):
        pass


def test_h5py_reads_the_collected_data(tmp_path: Path):
    dataset = record(
        tmp_path / "d",
        lambda: CountingEnv(state=True, action_mask=True),
        episodes=6,
        seed=4,
    )
    file = export_hdf5(dataset, tmp_path / "out")
    with h5py.File(file) as data:
        assert list(data) == [f"episode_{i}" for i in range(6)]
        pairs = zip(data.values(), dataset.trajectories, strict=True)
        for (episode, truth), seed in zip(
            pairs, dataset.trajectories.seeds, strict=True
        ):
            assert episode.attrs["total_steps"] == len(truth)
            assert episode.attrs["seed"] == seed
            after = truth["next"]
            team = 0
            for g in ("hunter", "prey"):
                seen = episode[f"observations/{g}"]
                assert np.array_equal(seen[:-1], truth[g, "observation"])
                assert np.array_equal(seen[1:], after[g, "observation"])
                assert np.array_equal(episode[f"actions/{g}"], truth[g, "action"])
                infos = episode[f"infos/{g}"]
                assert np.array_equal(infos["mask"][1:], after[g, "mask"])
                assert ("action_mask" in infos) == ("action_mask" in truth[g].keys())
                if g == "hunter":
                    legal = truth[g, "action_mask"]
                    assert np.array_equal(infos["action_mask"][:-1], legal)
                assert np.array_equal(infos["reward"][1:], after[g, "reward"][..., 0])
                assert not infos["reward"][0].any()
                team = team + after[g, "reward"].sum((1, 2))
            assert np.array_equal(episode["observations/state"][1:], after["state"])
            assert np.allclose(episode["rewards"], team)
            assert np.array_equal(episode["terminations"], after["terminated"][:, 0])
            assert np.array_equal(episode["truncations"], after["truncated"][:, 0])


def test_minari_reads_every_space(tmp_path: Path):
    dataset = record(tmp_path / "d", EverySpace, episodes=3, seed=1)
    chosen = dataset.trajectories[1:]
    export_hdf5(chosen, tmp_path / "out", dataset_id="mine/every-v3", compression=None)
    theirs = minari.MinariDataset(tmp_path / "out")
    assert (theirs.total_episodes, theirs.total_steps) == (2, 4)
    assert theirs.spec.dataset_id == "mine/every-v3"
    for episode, truth in zip(theirs.iterate_episodes(), chosen, strict=True):
        assert len(episode) == 2
        seen, after = episode.observations["g"], truth["next", "g", "observation"]
        assert np.array_equal(seen["image"][1:], after["image"])
        assert np.array_equal(seen["pair"][0][1:], after["pair", "0"])
        assert np.array_equal(seen["pair"][1][1:], after["pair", "1"])
        assert np.array_equal(seen["bits"][1:], after["bits"])
        assert np.array_equal(episode.observations["state"][:-1], truth["state"])
        assert np.array_equal(episode.actions["g"], truth["g", "action"])
        assert episode.rewards.tolist() == [1.5, 2.5]
        assert episode.terminations.tolist() == [False, True]
        for t in range(3):
            frame = minari_frame(episode.observations, t)
            assert theirs.observation_space.contains(frame)
        assert theirs.action_space.contains({"g": episode.actions["g"][0]})


def minari_frame(value, t: int):
    if isinstance(value, dict):
        return {name: minari_frame(inner, t) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(minari_frame(inner, t) for inner in value)
    return value[t]


def test_the_local_store_of_minari_has_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    dataset = record(
        tmp_path / "d", CountingEnv, episodes=3, env_kwargs={"size": 3}, task="my/task"
    )
    export(dataset, "mine/counting-v0", "minari")
    (name,) = minari.list_local_datasets()
    assert name == "mine/counting-v0"
    theirs = minari.load_dataset(name)
    assert theirs.spec.env_spec.kwargs == {"size": 3}
    assert theirs.spec.env_spec.id == "my_task"
    assert theirs.total_episodes == len(dataset.trajectories)
    with pytest.raises(FileExistsError):
        export(dataset, "mine/counting-v0", "minari")
    with pytest.raises(ValueError, match="is not an id of a Minari dataset"):
        export(dataset, "../counting", "minari")


def test_short_episodes_need_no_more_space_than_the_dataset(tmp_path: Path):
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    factory = find_factory("simple_spread_v3", {})
    dataset = record(tmp_path / "d", factory, episodes=100, seed=0)
    assert dataset.trajectories.lengths.mean() < 30
    export_hdf5(dataset, tmp_path / "out")
    assert size_of(tmp_path / "out") <= size_of(tmp_path / "d")


def test_data_that_cannot_be_exported_raise_an_error(tmp_path: Path):
    collector = Collector(
        CountingEnv, frames_per_batch=40, total_frames=40, compact_obs=True
    )
    description = DatasetDescription("counting", collector.description)
    with Writer(tmp_path / "d", description) as writer:
        writer.add(collector.next())
    dataset = open_dataset(tmp_path / "d")
    with pytest.raises(KeyError, match="collected with compact_obs"):
        export_hdf5(dataset, tmp_path / "out")
    with pytest.raises(ValueError, match="no complete episodes"):
        export_hdf5(dataset.trajectories[:0], tmp_path / "other")
    with pytest.raises(FileExistsError, match="new or empty"):
        export_hdf5(dataset, tmp_path / "d")
    assert not (tmp_path / "out" / "main_data.hdf5").exists()
    assert not (tmp_path / "other").exists()


def test_without_h5py_the_error_names_the_extra(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    dataset = record(tmp_path / "d", CountingEnv, episodes=1)
    with pytest.raises(ImportError, match=r"marl-collect\[hdf5\]"):
        export_hdf5(dataset, tmp_path / "out")
