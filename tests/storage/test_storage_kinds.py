"""Every kind of batch is read as it was written, bit by bit, and by foreign readers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from storage_streams import (
    ABOUT,
    DTYPES,
    SHAPES,
    Stream,
    bytes_of,
    collected,
    complete_episodes,
    flat_frames,
    frames_of,
    read,
    traj_id,
    write,
)

from marl_collect import restore_next
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.writer import Writer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_every_dtype_and_shape_come_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    batches = Stream(extras={"extra": (dtype, shape)}).batches()
    write(tmp_path, batches)
    dataset = open_dataset(tmp_path)
    frames = dataset[range(24)]
    assert frames["g", "extra"].dtype == dtype
    assert frames["g", "extra"].shape == (24, 2, *shape)
    assert flat_frames(frames) == frames_of(*batches)

    episodes = complete_episodes(frames_of(*batches))
    trajectories = dataset.trajectories
    pieces = trajectories.sequences(trajectories.lengths.max(), burn_in=1)
    (padded,) = pieces.loader(len(episodes), shuffle=False)  # With a column of zeros.
    (steps,) = trajectories.n_step(1).loader(len(trajectories.transitions), seed=0)
    assert steps["g", "extra"].dtype == dtype
    for data in padded.unbind(0):
        valid = data["collector", "mask"]
        read_again = flat_frames(data[valid].exclude(("collector", "mask")))
        assert read_again == episodes[traj_id(read_again[0])]
        assert not any(bytes_of(data["g", "extra"][~valid]))

    key = ("g", "extra")
    if dtype.is_complex:
        with pytest.raises(ValueError, match="complex"):
            dataset.transitions.moments(key)
        return
    moments = dataset.transitions.moments(key)
    (scaled,) = dataset.transitions.normalised(moments).loader(24, shuffle=False)
    expected = (frames[key].float() - moments[key].mean) / moments[key].std.clamp(1e-6)
    torch.testing.assert_close(scaled[key], expected, equal_nan=True)


def test_zeros_of_either_sign_are_told_apart(tmp_path: Path) -> None:
    batch = Stream().batch()
    batch["g", "observation"].zero_()
    batch["next", "g", "observation"].zero_().neg_()
    write(tmp_path, [batch])
    assert read(tmp_path) == frames_of(batch)


def test_any_names_of_keys_are_read_again(tmp_path: Path) -> None:
    names = ("", ".", "..", "a//b", "/", "a.b", "%2E", "\\")
    batch = Stream(extras=dict.fromkeys(names, (torch.float32, (3,)))).batch()
    for name in names:
        batch["in", name] = torch.rand(*batch.shape)
    write(tmp_path, [batch])
    assert read(tmp_path) == frames_of(batch)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("says_begin", [False, True])
def test_episodes_are_those_that_a_plain_loop_finds(
    tmp_path: Path, ragged: bool, begun: bool, says_begin: bool
) -> None:
    stream = Stream(3, 3, ragged=ragged, begun=begun, says_begin=says_begin)
    batches = stream.batches(12)
    with Writer(tmp_path, ABOUT) as writer:
        counted = sum(len(writer.add(batch)) for batch in batches)
    trajectories = open_dataset(tmp_path).trajectories
    expected = complete_episodes(frames_of(*batches))
    if not says_begin and not begun:
        # A first episode with a number that is not 0 may have begun before.
        expected = {key: e for key, e in expected.items() if key & 0xFFFFFFFF != 7}
    assert len(expected) > 5
    assert len(trajectories) == counted == len(expected)
    for i, data in enumerate(trajectories):
        key = int(data["collector", "traj_ids"][0])
        assert flat_frames(data) == expected[key]
        rewards = data["next", "g", "reward"].double().sum()
        assert trajectories.returns[i] == pytest.approx(float(rewards))
        assert trajectories.lengths[i] == len(expected[key])
        end = bool(data["next", "terminated"][-1])
        assert trajectories.episodes[i].terminated == end
        assert trajectories.episodes[i].environment == key >> 32


def test_an_episode_0_is_not_whole_if_another_environment_is_in_a_later_one(
    tmp_path: Path,
) -> None:
    stream = Stream(n_envs=6)
    stream.batch(3)  # The collector was running before.
    batch = stream.batch(12)
    numbers = batch["collector", "traj_ids"][:, 0] & 0xFFFFFFFF
    assert 0 < (numbers == 0).sum() < 6
    write(tmp_path, [batch])
    trajectories = open_dataset(tmp_path).trajectories
    assert len(trajectories) > 5
    for episode in trajectories:
        assert episode["frame"].tolist() == list(range(len(episode)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact_obs": True},
        {"trajs_per_batch": 5},
        {"max_frames_per_traj": 7},
        {"n_envs": 130, "frames": 130 * 6},
    ],
    ids=str,
)
def test_batches_of_collectors_come_back(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    about, batches = collected(**{"n_envs": 3, "frames": 60, "batches": 4} | options)
    write(tmp_path, batches, about)
    if "compact_obs" in options:
        last = ("collector", "last_observations")
        batches = [restore_next(b.clone(recurse=False)).exclude(last) for b in batches]
    dataset = open_dataset(tmp_path)
    assert read(dataset) == frames_of(*batches)
    assert len(dataset.trajectories) > 3


@pytest.mark.processes
def test_foreign_readers_open_the_folder(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    duckdb = pytest.importorskip("duckdb")
    stream = Stream(says_begin=True)
    batches = stream.batches(3)
    write(tmp_path / "data", batches)
    rewards = torch.cat([b["next", "g", "reward"].flatten(0, 1) for b in batches])
    frame = pandas.read_parquet(tmp_path / "data")
    assert np.allclose(
        np.array([[list(v) for v in row] for row in frame["next.g.reward"]]), rewards
    )
    loaded = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "data" / "*.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert np.allclose(loaded["next.g.reward"], rewards)
    files = f"read_parquet('{tmp_path}/data/*.parquet', file_row_number = true)"
    rows = duckdb.sql(f"""
        SELECT "next.g.reward", count(*) OVER (PARTITION BY run, "collector.traj_ids")
        FROM {files} ORDER BY file_row_number
    """).fetchall()
    assert np.allclose(np.array([reward for reward, _ in rows]), rewards)
    ids = torch.cat([b["collector", "traj_ids"].flatten() for b in batches]).tolist()
    assert [count for _, count in rows] == [ids.count(i) for i in ids]
    assert loaded["frame_index"] == [
        int(i) for b in batches for i in b["frame"].flatten()
    ]


def test_a_dataset_may_have_no_complete_episode(tmp_path: Path) -> None:
    write(tmp_path, [Stream(begun=False, says_begin=True).batch(1)])
    dataset = open_dataset(tmp_path)
    trajectories = dataset.trajectories
    assert (len(dataset), len(trajectories), len(trajectories.returns)) == (2, 0, 0)
    with pytest.raises(ValueError, match="no episodes to sample"):
        trajectories.sample(1)
    with pytest.raises(ValueError, match="no frames to sample"):
        trajectories.transitions.sample(1)


@pytest.mark.accelerator
def test_a_batch_of_an_accelerator_is_written(tmp_path: Path) -> None:
    batch = Stream(ragged=True).batch()
    write(tmp_path, [batch.to("cuda")])
    assert read(tmp_path) == frames_of(batch)
