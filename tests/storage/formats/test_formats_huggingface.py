"""Hugging Face's ``datasets`` opens an export."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from support.datasets import record_here

pytest.importorskip("pyarrow", reason="needs the extra huggingface")

from workloads.counting import CountingEnv, CountingOptions

from marl_collect.storage import Dataset, export_dataset, import_dataset
from marl_collect.storage.formats import huggingface


def make_env() -> Any:
    return CountingEnv(CountingOptions(image=(20, 24, 3), state=True))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("huggingface") / "d"
    return record_here(path, make_env, episodes=6)


def test_load_dataset_opens_an_export(dataset: Dataset, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra dev")
    folder = export_dataset(dataset, tmp_path / "hub", "huggingface")
    frames = datasets.load_dataset(
        "parquet",
        data_dir=str(folder / "data"),
        split="train",
        cache_dir=tmp_path / "c",
    )
    trajectories = dataset.trajectories
    assert len(frames) == trajectories.lengths.sum()
    picture = frames.features["hunter.observation.image"].feature
    assert isinstance(picture, datasets.Image)
    at = 0
    for number, episode in enumerate(trajectories):
        rows = frames[at : at + len(episode)]
        at += len(episode)
        assert rows["episode"] == [number] * len(episode)
        assert rows["frame"] == list(range(len(episode)))
        assert rows["next.done"][-1] is True
        # The next value is that of the next row, but at the end.
        assert rows["next.prey.observation"][:-1] == [None] * (len(episode) - 1)
        last = episode["next", "prey", "observation"][-1]
        assert np.array_equal(rows["next.prey.observation"][-1], last)
        for name, key in (
            ("prey.observation", ("prey", "observation")),
            ("hunter.action", ("hunter", "action")),
            ("state", "state"),
        ):
            assert np.array_equal(
                rows[name], episode[key].reshape(len(episode), -1)
            ) or (np.array_equal(rows[name], episode[key]))
        rewards = episode["next", "prey", "reward"][..., 0]
        assert np.array_equal(rows["next.prey.reward"], rewards)
        observations = [
            [np.asarray(p) for p in row] for row in rows["hunter.observation.image"]
        ]
        assert np.array_equal(observations, episode["hunter", "observation", "image"])


def test_the_card_has_what_the_hub_reads(dataset: Dataset, tmp_path: Path) -> None:
    folder = export_dataset(dataset, tmp_path / "hub", "huggingface")
    text = (folder / "README.md").read_text()
    front, body = text.removeprefix("---\n").split("---\n", 1)
    about = yaml.safe_load(front)
    (files,) = about["configs"][0]["data_files"]
    assert list(folder.glob(files["path"]))
    assert "reinforcement-learning" in about["task_categories"]
    assert "| hunter | 2: hunter_0, hunter_1 |" in body
    assert f"6 complete episodes of `{dataset.contents.description.task}`" in body


def test_episodes_may_span_files_and_groups_of_rows(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    monkeypatch.setattr("marl_collect.storage.formats.blocks._FRAMES", 1)
    monkeypatch.setattr(huggingface, "_SHARD", 1)
    folder = export_dataset(dataset, tmp_path / "hub", "huggingface")
    shards = sorted((folder / "data").iterdir())
    assert len(shards) == len(dataset.trajectories)
    # Other tools write groups of rows of any size.
    table = parquet.read_table(shards[0])
    parquet.write_table(table, shards[0], row_group_size=2)
    imported = import_dataset(folder, tmp_path / "again", "huggingface")
    assert np.array_equal(imported.trajectories.returns, dataset.trajectories.returns)
    os.remove(shards[2])
    with pytest.raises(ValueError, match="header says 6 with .*: a part is missing"):
        import_dataset(folder, tmp_path / "less", "huggingface")
    parquet.write_table(table.take(list(range(len(table)))[::-1]), shards[0])
    with pytest.raises(ValueError, match="rows are not the frames of whole episodes"):
        import_dataset(folder, tmp_path / "less", "huggingface")
    shards[0].write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"train-00000\.parquet is not a complete exp"):
        import_dataset(folder, tmp_path / "less", "huggingface")
    (folder / "marl_collect.json").unlink()
    with pytest.raises(ValueError, match="has no marl_collect.json, so it is not of"):
        import_dataset(folder, tmp_path / "less", "huggingface")
    assert not (tmp_path / "less").exists()
