"""Several datasets read like one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from storage_fuzz import batches, read_all, same, write
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    RunDescription,
    Writer,
    concatenate,
)


def add(path: Path, seed: int, count: int = 3, **options: Any) -> Dataset:
    """Write a dataset of one run with images, whose episodes cross batches."""
    description, data = batches(count, seed)
    with Writer(path, description, RunDescription(seed=seed), **options) as writer:
        for batch in data:
            writer.add(batch)
    return open_dataset(path)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """One with two runs, one packed by another codec, one of raw numbers."""
    path = tmp_path_factory.mktemp("joined")
    write(path / "a")
    add(path / "b", 7, compression="zstd")
    add(path / "c", 8, compression="none")
    return [open_dataset(path / name) for name in "abc"]


@pytest.fixture
def joined(datasets: list[Dataset]) -> Dataset:
    return concatenate(datasets)


def test_joined_datasets_read_like_one(
    joined: Dataset, datasets: list[Dataset]
) -> None:
    contents = [read_all(dataset) for dataset in datasets]
    joined_content = read_all(joined)
    assert same(
        joined_content[0], [batch for content in contents for batch in content[0]]
    )
    assert same(joined_content[1], torch.cat([content[1] for content in contents]))
    for index in (2, 3, 4):  # Episodes, trajectories, seeds.
        assert same(
            joined_content[index],
            [item for content in contents for item in content[index]],
        )
    totals = [content.contents.totals for content in datasets]
    assert joined.contents.totals.frames == sum(t.frames for t in totals)
    assert joined.contents.totals.episodes == sum(t.episodes for t in totals)
    assert len(joined.contents.runs) == 4
    assert joined.contents.runs[2].seed == 7
    joined.verify()
    frames = joined.transitions
    order = torch.randperm(len(frames), generator=torch.Generator().manual_seed(0))
    assert same(frames[order], joined_content[1][order])
    assert same(
        frames.select(("hunter", "image"))[order[:50]],
        joined_content[1][order[:50]].select(("hunter", "image")),
    )


@pytest.mark.forks
def test_joined_datasets_are_loaded_in_epochs(
    joined: Dataset, datasets: list[Dataset]
) -> None:
    episodes = joined.trajectories
    kinds: Any = [
        (joined, len(joined.transitions), 2),
        (episodes.sequences(4), len(episodes.transitions), 0),
        (episodes, len(episodes.transitions), 0),
    ]
    for source, frames, workers in kinds:
        n_read = 0
        for batch in source.loader(batch_size=7, seed=0, workers=workers):
            mask = batch.get(("collector", "mask"), torch.ones(batch.shape))
            n_read += int(mask.sum())
        assert n_read == frames
    assert joined.trajectories.sample(5).shape[0] == 5
    best = joined.trajectories.split_by_return([0.5])[1]
    assert 0 < len(best) < len(joined.trajectories)


def test_a_view_of_a_view_has_all_folders(datasets: list[Dataset]) -> None:
    view = concatenate([concatenate(datasets[:2]), datasets[2]])
    assert [folder.path for folder, _ in view.parts] == [d.path for d in datasets]
    assert str(datasets[1].path) in repr(view)
    assert str(datasets[1].path) in repr(view.transitions)
    with pytest.raises(ValueError, match="has 3 folders, not one"):
        _ = view.path


def other(path: Path, task: str = "c", **settings: Any) -> Path:
    collector = Collector(lambda: CountingEnv(**settings), frames_per_batch=20)
    with Writer(path, DatasetDescription(task, collector.description)) as writer:
        writer.add(collector.next())
    return path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "d"}, "task is d in the former, but c in the latter"),
        ({"state": True}, "environment/root/state is .* but None in the latter"),
        ({}, "hunter/image is missing in the former, but .*uint8 in the latter"),
    ],
)
def test_datasets_of_different_kinds_are_refused(
    datasets: list[Dataset], tmp_path: Path, settings: Any, message: str
) -> None:
    different = other(tmp_path / "other", **settings)
    with pytest.raises(ValueError, match=message) as error:
        concatenate([datasets[0], different])
    assert str(different) in str(error.value)
    assert str(datasets[0].path) in str(error.value)


def test_nothing_to_join_is_an_error(datasets: list[Dataset]) -> None:
    nothing: list[Any] = [[], "folder", datasets[0]]
    for sources in nothing:
        with pytest.raises(ValueError, match="must be a list of datasets"):
            concatenate(sources)
