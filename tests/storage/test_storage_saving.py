"""Saving selections of episodes."""

from pathlib import Path

import pytest
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.core.seeding import episode_seed
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    Metadata,
    RunDescription,
    Writer,
    concatenate,
    save,
)

ABOUT = Metadata("A. Author", "CC-BY-4.0", "Counting, for tests.", ("tests", "small"))


def write(path: Path, seed: int, metadata: Metadata | None = None) -> Dataset:
    """Write a dataset of episodes that cross batches."""
    collector = Collector(
        [CountingEnv] * 2, frames_per_batch=20, total_frames=200, seed=seed
    )
    about = DatasetDescription("counting", collector.description)
    with Writer(path, about, RunDescription(seed), metadata=metadata) as writer:
        for batch in collector:
            writer.add(batch)
    return open_dataset(path)


def test_the_seed_of_an_episode_follows_from_its_run(tmp_path: Path) -> None:
    write(tmp_path / "a", 3, ABOUT)
    write(tmp_path / "a", 2**40)
    trajectories = open_dataset(tmp_path / "a").trajectories
    ids = [int(t["collector", "traj_ids"][0]) for t in trajectories]
    runs = [trajectories.contents.runs[run].seed for run in trajectories.runs]
    assert set(runs) == {3, 2**40}
    assert trajectories.seeds == [
        episode_seed(seed or 0, number >> 32, number & 0xFFFFFFFF)
        for seed, number in zip(runs, ids, strict=True)
    ]


def test_a_selection_is_saved_as_a_dataset(tmp_path: Path) -> None:
    dataset = write(tmp_path / "a", 0, ABOUT)
    write(tmp_path / "a", 1)
    dataset = open_dataset(tmp_path / "a")
    long_episodes = dataset.trajectories.filter(lambda episode: episode.length > 5)
    assert 0 < len(long_episodes) < len(dataset.trajectories)
    saved = save(long_episodes, tmp_path / "b")
    saved.verify()
    assert len(saved.transitions) == long_episodes.lengths.sum()
    assert saved.trajectories.seeds == long_episodes.seeds
    assert saved.trajectories.runs.tolist() == long_episodes.runs.tolist()
    assert (saved.trajectories.cat() == long_episodes.cat()).all()
    assert saved.contents.metadata == ABOUT
    with pytest.raises(FileExistsError):
        save(long_episodes, tmp_path / "b")
    with pytest.raises(ValueError, match="no complete episodes"):
        save(long_episodes[:0], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_dataset_joined_with_itself_is_saved_as_two_runs(tmp_path: Path) -> None:
    dataset = write(tmp_path / "a", 0)
    twice = concatenate([dataset, dataset]).trajectories
    saved = save(twice, tmp_path / "b")
    assert saved.trajectories.runs.tolist() == twice.runs.tolist()
    assert set(twice.runs.tolist()) == {0, 1}
    assert (saved.trajectories.cat() == twice.cat()).all()
