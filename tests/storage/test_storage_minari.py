"""Minari reads exports."""

import operator
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
from storage_streams import GROUP, Stream, write
from tensordict import TensorDict
from torch.utils._pytree import tree_map

from marl_collect import EnvDescription, GroupDescription, open_dataset
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    RunDescription,
    export_minari,
)

# Minari asks for code and authors of every dataset, and leaves temporary folders.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:minari"),
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Two runs of three episodes, each of two frames, with every kind of space.

    The second group has a mask of actions. There is NaN.
    """
    observation = spaces.Dict(
        image=spaces.Box(0, 255, (20, 16, 3), np.uint8),
        pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
        bits=spaces.MultiBinary(3),
    )
    agents, box = ("a", "b"), spaces.Box(-1, 1, (2,))
    group = GroupDescription(agents, observation, spaces.MultiDiscrete([2, 3]))
    other = GroupDescription(agents, box, spaces.Discrete(2), action_mask=True)
    state = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    environment = EnvDescription("every", {"g": group, "h": other}, {"state": state})
    about = DatasetDescription("every/task", environment, {"size": 3})
    rng = np.random.default_rng(0)

    for seed in (4, 5):
        batch = TensorDict({}, [3, 2])
        for key, field in environment.row().items():
            values: Any = rng.random((3, 3, *field.shape)) * 2 - 1
            values = values if field.dtype.kind == "f" else values > 0
            drawn = torch.from_numpy(values.astype(field.dtype))
            if key not in environment.outcome():
                batch[key] = drawn[:, :-1]
            if key not in environment.actions():
                batch["next", *key] = drawn[:, 1:]
        batch["collector", "traj_ids"] = (torch.arange(3) << 32)[:, None].expand(3, 2)
        batch["state"][..., 0] = np.nan
        batch["g", "half"] = torch.rand(3, 2, 2).bfloat16()
        done = torch.tensor([[False], [True]]).expand(3, 2, 1)
        batch["next", "done"] = done
        batch["next", "terminated"] = done & (torch.arange(3) < 2)[:, None, None]
        batch["next", "truncated"] = done & ~batch["next", "terminated"]
        write(tmp_path / "d", [batch], about, RunDescription(seed))
    return open_dataset(tmp_path / "d")


def test_minari_reads_every_space(dataset: Dataset) -> None:
    name, selection = "mine/every-v3", dataset.trajectories[1:]
    assert export_minari(selection, name).is_dir()
    with pytest.raises(FileExistsError):
        export_minari(dataset, name)
    assert [*minari.list_local_datasets()] == [name]
    theirs = minari.load_dataset(name)
    assert (theirs.total_episodes, theirs.total_steps) == (5, 10)
    assert theirs.spec.dataset_id == name
    assert theirs.spec.env_spec.kwargs == {"size": 3}
    assert theirs.spec.env_spec.id == "every_task"
    about = [*theirs.storage.get_episode_metadata(range(5))]
    assert [metadata["seed"] for metadata in about] == selection.seeds
    assert [metadata["run"] for metadata in about] == [0, 0, 1, 1, 1]
    for episode, truth in zip(theirs.iterate_episodes(), selection, strict=True):
        after, (g, h) = truth["next"], (episode.observations[n] for n in "gh")
        infos, state = episode.infos["h"], episode.observations["state"]
        expected = after["g", "observation"]
        assert "action_mask" not in episode.infos["g"]
        for actual, values in (
            (g["image"][1:], expected["image"]),
            (g["bits"][1:], expected["bits"]),
            (g["pair"][0][1:], expected["pair", "0"]),
            (g["pair"][1][1:], expected["pair", "1"]),
            (h[:-1], truth["h", "observation"]),
            (h[1:], after["h", "observation"]),
            (state[:-1], truth["state"]),
            (state[1:], after["state"]),
            (episode.actions["g"], truth["g", "action"]),
            (episode.actions["h"], truth["h", "action"]),
            (episode.infos["g"]["half"], truth["g", "half"].float()),
            (infos["mask"][:-1], truth["h", "mask"]),
            (infos["mask"][1:], after["h", "mask"]),
            (infos["action_mask"][:-1], truth["h", "action_mask"]),
            (episode.infos["next"]["h"]["reward"], after["h", "reward"]),
            (infos["terminated"][1:], after["h", "terminated"]),
            (episode.terminations, after["terminated"][:, 0]),
            (episode.truncations, after["truncated"][:, 0]),
        ):
            assert np.array_equal(actual, values, equal_nan=True)
        team = sum(after[name, "reward"].double().sum((1, 2)) for name in "gh")
        assert np.allclose(episode.rewards, team)
        assert theirs.action_space["g"].contains(episode.actions["g"][0])
        known = tree_map(np.nan_to_num, episode.observations)
        for t in range(3):
            frame = tree_map(operator.itemgetter(t), known)
            assert theirs.observation_space.contains(frame)


def test_an_export_that_fails_leaves_nothing(
    dataset: Dataset, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = dataset.trajectories[:3]
    ends = [("next", name) for name in ("terminated", "truncated")]
    rewards = [("next", name, "reward") for name in "gh"]
    first = episodes.select("g", "h", "state", *ends, *rewards)
    for message, selection, name in (
        ("no next/g/observation/bits", first, "x-v0"),
        ("no g/action, which Minari needs", episodes.select("next"), "x-v0"),
        ("is not an id of a Minari dataset", episodes, "../counting"),
    ):
        with pytest.raises((KeyError, ValueError), match=message):
            export_minari(selection, name)
    assert not store.exists()
    reports = [(0, 6, 0), (2, 6, 1), (4, 6, 1), (6, 6, 1)]

    def stop(done: int, total: int, ended: Any) -> None:
        assert (done, total, len(ended)) == reports.pop(0)
        if not reports:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_minari(episodes, "mine/counting-v0", progress=stop)
    # HDF5 would end the process with a signal.
    free = iter([2**30, 2**24])
    usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=next(free)))
    monkeypatch.setattr("marl_collect.storage.minari.shutil", usage)
    with pytest.raises(OSError, match="The disk is full: the next episode has up to"):
        export_minari(episodes, "mine/counting-v0")
    assert not list(store.iterdir())


def test_groups_that_would_be_folders_are_refused(tmp_path: Path) -> None:
    about = DatasetDescription("red", EnvDescription("red", {"team/red": GROUP}))
    write(tmp_path / "d", Stream().batches(), about)
    with pytest.raises(ValueError, match="which the group team/red has"):
        export_minari(open_dataset(tmp_path / "d"), "slashes-v0")
