"""Every kind of batch is read as it was written, bit by bit, and by foreign readers."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from storage_streams import (
    DTYPES,
    ENVIRONMENT,
    SHAPES,
    Stream,
    complete_episodes,
    flat_frames,
    frames_of,
)
from workloads.counting import CountingEnv

from marl_collect import Collector, restore_next
from marl_collect.storage import DatasetDescription, cache
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.writer import Writer

ABOUT = DatasetDescription("stream", ENVIRONMENT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_every_dtype_and_shape_come_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    stream = Stream(extras={"extra": (dtype, shape)})
    expected = []
    with Writer(tmp_path, ABOUT) as writer:
        for _ in range(2):
            batch = stream.batch()
            expected += frames_of(batch)
            writer.add(batch)
    dataset = open_dataset(tmp_path)
    read = dataset[np.arange(len(dataset))]
    assert read["g", "extra"].dtype == dtype
    assert read["g", "extra"].shape == (24, 2, *shape)
    assert flat_frames(read) == expected


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("says_begin", [False, True])
def test_episodes_are_those_that_a_plain_loop_finds(
    tmp_path: Path, ragged: bool, begun: bool, says_begin: bool
) -> None:
    stream = Stream(3, 3, ragged=ragged, begun=begun, says_begin=says_begin)
    frames = []
    counted = 0
    with Writer(tmp_path, ABOUT) as writer:
        for _ in range(12):
            batch = stream.batch()
            frames += frames_of(batch)
            counted += len(writer.add(batch))
    dataset = open_dataset(tmp_path)
    trajectories = dataset.trajectories
    expected = complete_episodes(frames)
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


def collected(kind: str) -> Iterator[Any]:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "compact": {"compact_obs": True},
        "ragged": {"trajs_per_batch": 5},
        "limited": {"max_frames_per_traj": 7},
        "many": {"frames_per_batch": 130 * 6},
    }
    n_envs = 130 if kind == "many" else 3
    options = {"frames_per_batch": 60} | kinds[kind]
    factories = [partial(CountingEnv, n_prey=1)] * n_envs
    collector = Collector(factories, seed=0, total_frames=-1, **options)
    with collector:
        for _ in range(4):
            yield collector, collector.next()


@pytest.mark.parametrize("kind", ["plain", "compact", "ragged", "limited", "many"])
def test_batches_of_collectors_come_back(tmp_path: Path, kind: str) -> None:
    expected = []
    writer: Any = None
    for collector, batch in collected(kind):
        writer = writer or Writer(
            tmp_path, DatasetDescription("counting", collector.description)
        )
        writer.add(batch)
        if kind == "compact":
            batch = restore_next(batch.clone(recurse=False))
            batch = batch.exclude(("collector", "last_observations"))
        expected += frames_of(batch)
    writer.close()
    dataset = open_dataset(tmp_path)
    assert flat_frames(dataset[np.arange(len(dataset))]) == expected
    assert len(dataset.trajectories) > 3


def test_foreign_readers_open_the_folder(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    duckdb = pytest.importorskip("duckdb")
    stream = Stream(says_begin=True)
    with Writer(tmp_path / "data", ABOUT) as writer:
        batches = [stream.batch() for _ in range(3)]
        for batch in batches:
            writer.add(batch)
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
    stream = Stream(begun=False, says_begin=True)
    with Writer(tmp_path, ABOUT) as writer:
        writer.add(stream.batch(1))
    dataset = open_dataset(tmp_path)
    assert len(dataset) == 2
    assert len(dataset.trajectories) == 0
    assert dataset.trajectories.returns.shape == (0,)


def test_a_run_that_was_deleted_is_not_in_the_cache(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        with Writer(tmp_path, ABOUT) as writer:
            batch = Stream(seed).batch()
            writer.add(batch)
        runs.append(writer.run)
    assert len(open_dataset(tmp_path)) == 24
    for path in tmp_path.glob(f"{runs[0]}.*"):
        path.unlink()
    dataset = open_dataset(tmp_path)
    assert flat_frames(dataset[np.arange(len(dataset))]) == frames_of(batch)


def test_joined_files_need_no_new_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream()
    with Writer(tmp_path, ABOUT) as writer:
        for _ in range(3):
            writer.add(stream.batch())
        first = open_dataset(tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    monkeypatch.setattr(cache, "read_table", None)  # Nothing is decoded again.
    again = open_dataset(tmp_path)
    assert again.frames.cache.state == first.frames.cache.state
