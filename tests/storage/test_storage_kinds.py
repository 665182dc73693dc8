"""Every kind of batch is read as it was written, bit by bit, and by foreign readers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storage_streams import (
    DTYPES,
    SHAPES,
    Stream,
    bytes_of,
    complete_episodes,
    flat_frames,
    frames_of,
    read,
    traj_id,
    write,
)
from tensordict import TensorDict

from marl_collect.storage import Trajectories, open_dataset
from marl_collect.storage.statistics import Range

EXTRA = ("g", "extra")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_every_dtype_and_shape_come_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    monkeypatch.setattr("marl_collect.storage.frames._PART", 7)
    # As if the data did not fit into memory.
    monkeypatch.setattr("marl_collect.storage.cache.free_memory", lambda: 1)
    batches = Stream(extras={"extra": (dtype, shape)}).batches()
    for batch in batches:
        batch["constant"] = torch.full(batch.shape, 0.1)
    write(tmp_path, batches)
    dataset = open_dataset(tmp_path)
    frames = dataset.transitions[:]
    assert frames[EXTRA].dtype == dtype
    assert frames[EXTRA].shape == (24, 2, *shape)
    assert flat_frames(frames) == frames_of(*batches)

    episodes = complete_episodes(frames_of(*batches))
    trajectories = dataset.trajectories
    pieces = trajectories.sequences(trajectories.lengths.max(), burn_in=1)
    (padded,) = pieces.loader(len(episodes), shuffle=False)  # With a column of zeros.
    (steps,) = trajectories.n_step(1).loader(len(trajectories.transitions), seed=0)
    assert steps[EXTRA].dtype == dtype
    for data in padded.unbind(0):
        valid = data["collector", "mask"]
        read_again = flat_frames(data[valid].exclude(("collector", "mask")))
        assert read_again == episodes[traj_id(read_again[0])]
        assert not any(bytes_of(data[EXTRA][~valid]))

    actual = dataset.transitions.ranges()[EXTRA]
    if dtype.is_complex:
        assert actual == Range()
        with pytest.raises(ValueError, match="complex"):
            dataset.transitions.moments(EXTRA)
        return
    values = frames[EXTRA].double() if dtype.is_floating_point else frames[EXTRA]
    numbers = values.flatten().tolist()
    known = [number for number in numbers if not math.isnan(number)]
    low, high = min(known, default=None), max(known, default=None)
    assert actual == Range(low, high, len(numbers) - len(known))
    check_moments(trajectories, pieces, padded)


def check_moments(trajectories: Trajectories, pieces: Any, padded: Any) -> None:
    """Moments are over all frames and agents. Normalised padding is zero."""
    frames = trajectories.transitions
    moments = frames.moments(EXTRA, "constant")
    of_agents = frames[:][EXTRA].double().flatten(0, 1)
    std = mean = torch.zeros(of_agents.shape[1:])
    if of_agents.numel():  # Otherwise torch warns.
        std, mean = torch.std_mean(of_agents, 0, correction=0)
    scaled = pieces.normalised(moments).__getitems__(list(range(len(pieces))))
    mask = padded["collector", "mask"]
    assert not scaled["constant"].any()
    for key in (EXTRA, ("next", *EXTRA)):
        expected = (padded[key].float() - mean.float()) / std.float().clamp(1e-6)
        expected *= mask.view(*mask.shape, *[1] * (expected.ndim - 2))
        torch.testing.assert_close(scaled[key], expected, equal_nan=True)


def zeros_of_either_sign() -> TensorDict:
    batch = Stream().batch()
    batch["g", "observation"].zero_()
    batch["next", "g", "observation"].zero_().neg_()
    return batch


def any_names() -> TensorDict:
    names = ("", ".", "..", "a//b", "/", "a.b", "%2E", "\\")
    batch = Stream(extras=dict.fromkeys(names, (torch.float32, (3,)))).batch()
    for name in names:
        batch["in", name] = torch.rand(*batch.shape)
    return batch


def many_rows() -> TensorDict:
    return Stream(n_envs=130).batch()


@pytest.mark.parametrize("make", [zeros_of_either_sign, any_names, many_rows])
def test_unusual_batches_come_back(tmp_path: Path, make: Any) -> None:
    batch = make()
    write(tmp_path, [batch])
    dataset, frames = open_dataset(tmp_path), frames_of(batch)
    assert read(dataset) == frames
    lengths = [len(episode) for episode in complete_episodes(frames).values()]
    assert sorted(dataset.trajectories.lengths) == sorted(lengths)


@pytest.mark.processes
def test_foreign_readers_open_the_folder(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    duckdb = pytest.importorskip("duckdb")
    batches = Stream(says_begin=True).batches(3)
    write(tmp_path / "data", batches)
    frames: Any = torch.cat([batch.reshape(-1) for batch in batches])
    rewards = frames["next", "g", "reward"]
    table = pandas.read_parquet(tmp_path / "data")
    assert np.allclose([[[*v] for v in row] for row in table["next.g.reward"]], rewards)
    loaded = datasets.load_dataset(
        "parquet",
        data_files=str(tmp_path / "data" / "*.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert np.allclose(loaded["next.g.reward"], rewards)
    assert loaded["frame_index"] == frames["frame"].tolist()
    rows = duckdb.sql(f"""
        SELECT "next.g.reward", count(*) OVER (PARTITION BY run, "collector.traj_ids")
        FROM read_parquet('{tmp_path}/data/*.parquet', file_row_number = true)
        ORDER BY file_row_number
    """).fetchall()
    assert np.allclose([reward for reward, _ in rows], rewards)
    ids = frames["collector", "traj_ids"].tolist()
    assert [count for _, count in rows] == [ids.count(i) for i in ids]


@pytest.mark.accelerator
def test_a_batch_of_an_accelerator_is_written(tmp_path: Path) -> None:
    batch = Stream(ragged=True).batch()
    write(tmp_path, [batch.to("cuda")])
    assert read(tmp_path) == frames_of(batch)
