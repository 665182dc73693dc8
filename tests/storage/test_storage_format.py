"""The format is what its specification says: a short reader without the package."""

from pathlib import Path
from typing import Any

import pytest
import torch
from format_reader import read_dataset
from storage_fuzz import batches, write_segments
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector, open_dataset
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import DatasetDescription, Writer
from marl_collect.storage.encoding import frame_bytes
from marl_collect.storage.index import RECORDS


def check(path: Path) -> None:
    """Compare all bytes of all keys with what the package reads."""
    dataset = open_dataset(path)
    raw_batches = read_dataset(path)
    assert len(raw_batches) == len(dataset) > 1
    for actual, batch in zip(raw_batches, dataset, strict=True):
        expected = {key: frame_bytes(value) for key, value in flatten(batch).items()}
        assert set(actual) == set(expected)
        for key, content in expected.items():
            assert (actual[key] == content).all(), key


def test_vectors_flags_and_tails(tmp_path: Path) -> None:
    for seed in (0, 1):
        collector = Collector(
            [lambda: CountingEnv(state=True)] * 3,
            frames_per_batch=30,
            total_frames=120,
            seed=seed,
        )
        with Writer(tmp_path, DatasetDescription("c", collector.description)) as writer:
            for number, batch in enumerate(collector):
                batch["half"] = torch.randn(*batch.shape, 2).bfloat16()
                batch["none"] = torch.empty(*batch.shape, 0)
                batch["next", "half"] = batch["half"].roll(-1, 1)
                batch["grown"] = torch.full(batch.shape, number % 3)
                writer.add(batch)
    contents = open_dataset(tmp_path).contents
    (layout, *further_layouts) = contents.layouts
    assert further_layouts
    assert ("next", "half") in layout.follows
    assert len(layout.record.bits)
    assert all(entry.tails for entry in contents.batches)
    check(tmp_path)


def test_ragged_batches(tmp_path: Path) -> None:
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=[10, 7], total_frames=34, seed=0
    ) as collector:
        description = DatasetDescription("c", collector.description)
        with Writer(tmp_path, description) as writer:
            for batch in collector:
                writer.add(batch)
    check(tmp_path)


@pytest.mark.parametrize("compression", ["lz4", "zstd", "none"])
def test_packed_images(tmp_path: Path, compression: Any) -> None:
    description, data = batches(2)
    with Writer(tmp_path / "d", description, compression=compression) as writer:
        for batch in data:
            writer.add(batch)
    layout = open_dataset(tmp_path / "d").contents.layouts[0]
    assert len(layout.packed) == 4
    check(tmp_path / "d")


def test_several_data_files(tmp_path: Path) -> None:
    write_segments(tmp_path / "d", "lz4")
    assert len(list((tmp_path / "d").glob("data-*"))) > 3
    check(tmp_path / "d")


def test_packed_records(tmp_path: Path) -> None:
    collector = Collector(
        [CountingEnv] * 2, frames_per_batch=20, total_frames=60, seed=0
    )
    about = DatasetDescription("c", collector.description)
    with Writer(tmp_path, about) as writer:
        for batch in collector:
            values = torch.randn(*batch.shape, 400, dtype=torch.float64)
            batch["wide"] = values * (torch.rand(values.shape) < 0.1)
            writer.add(batch)
    assert "packs_records" in (tmp_path / "journal.jsonl").read_text()
    (layout, *_) = open_dataset(tmp_path).contents.layouts
    assert RECORDS in layout.packed
    check(tmp_path)
