"""``compact``: the same data in a new dataset, also from earlier formats."""

import hashlib
import tarfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.cli.main import app
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    DatasetError,
    RunDescription,
    Writer,
    compact,
)
from marl_collect.storage.files import size_of

DIGEST = "a3501db808f66981b6a42ce832ac6d2d121144aa81b7665716e9e130244bb33c"
"""Of the stored dataset, as the version that wrote it read it."""


def digest(dataset: Dataset) -> str:
    """Return a digest of all frames, by run and key."""
    sha = hashlib.sha256()
    for run in range(len(dataset.contents.runs)):
        numbers = [i for i, b in enumerate(dataset.contents.batches) if b.run == run]
        frames = flatten(torch.cat([dataset[i] for i in numbers], 1))
        tensors = {str(k[0] if len(k) == 1 else k): t for k, t in frames.items()}
        for name, tensor in sorted(tensors.items()):
            sha.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
            sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A dataset of format version 2: two runs, packed frames and raw numbers."""
    archive = Path(__file__).with_name("format2_dataset.tar.xz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path / "old_ds"


def test_a_dataset_of_format_2_is_converted(old: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="marl-collect compact"):
        open_dataset(old)
    result = CliRunner().invoke(
        app, ["compact", str(old), "--out", str(tmp_path / "new")]
    )
    assert result.exit_code == 0, result.output
    assert "10 episodes, 96 frames" in result.output.replace("\n", " ")
    dataset = open_dataset(tmp_path / "new")
    dataset.verify()
    assert digest(dataset) == DIGEST
    assert [run.seed for run in dataset.contents.runs] == [3, 4]
    assert [run.started for run in dataset.contents.runs] == [
        "2026-01-01",
        "2026-01-02",
    ]
    assert dataset.contents.totals.return_sums == {
        "hunter": (-10.0, -12.0),
        "prey": (-10.0, 27.0, 10.0),
    }
    assert sum(dataset.trajectories.lengths) == 84


@pytest.mark.parametrize("name", ["prey/observation.memmap", "picture.lz4"])
def test_damage_in_format_2_is_not_converted(
    old: Path, tmp_path: Path, name: str
) -> None:
    path = old / "batch-000001" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="damaged"):
        compact(old, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_small_batches_are_joined(tmp_path: Path) -> None:
    makers = [lambda: CountingEnv(state=True)] * 3
    for seed in (0, 1):
        collector = Collector(makers, frames_per_batch=6, total_frames=120, seed=seed)
        about = DatasetDescription("counting", collector.description)
        with Writer(tmp_path / "a", about, RunDescription(seed)) as writer:
            for batch in collector:
                writer.add(batch)
    before = open_dataset(tmp_path / "a")
    after = compact(tmp_path / "a", tmp_path / "b")
    assert len(before) == 40
    assert [tuple(b.shape) for b in after.contents.batches] == [(3, 40), (3, 40)]
    assert digest(after) == digest(before)
    # Episodes are in the order of the batches in which they ended.
    assert set(after.trajectories.seeds) == set(before.trajectories.seeds)
    assert sorted(after.trajectories.returns) == sorted(before.trajectories.returns)
    assert size_of(tmp_path / "b") < size_of(tmp_path / "a")
    with pytest.raises(FileExistsError):
        compact(tmp_path / "a", tmp_path / "b")


def test_batches_with_rows_of_different_lengths_stay_as_they_are(
    tmp_path: Path,
) -> None:
    collector = Collector(
        [CountingEnv] * 2, frames_per_batch=40, total_frames=80, trajs_per_batch=2
    )
    about = DatasetDescription("counting", collector.description)
    with Writer(tmp_path / "a", about) as writer:
        for batch in collector:
            writer.add(batch)
    before = open_dataset(tmp_path / "a")
    after = compact(tmp_path / "a", tmp_path / "b")
    assert len(after) == len(before) > 1
    for i in range(len(before)):
        assert (after[i] == before[i]).all()
