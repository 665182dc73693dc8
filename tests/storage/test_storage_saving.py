"""Saving selections of episodes, and the metadata of datasets."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.cli.main import app
from marl_collect.core.seeding import episode_seed
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    Metadata,
    RunDescription,
    Writer,
    compact,
    concatenate,
    copy,
    export_dataset,
    import_dataset,
    label,
    merge,
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


def test_metadata_are_kept_by_everything_that_writes_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, ABOUT)
    write(tmp_path / "a", 1)  # Appending does not change them.
    write(tmp_path / "b", 2)
    merged = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "c")
    copy(tmp_path / "c", tmp_path / "d")
    compact(tmp_path / "d", tmp_path / "e")
    export_dataset(open_dataset(tmp_path / "e"), tmp_path / "e.hdf5", "hdf5")
    imported = import_dataset(tmp_path / "e.hdf5", tmp_path / "f", "hdf5")
    assert merged.contents.metadata == imported.contents.metadata == ABOUT


def test_metadata_are_changed_one_by_one(tmp_path: Path) -> None:
    write(tmp_path / "a", 0)
    path = str(tmp_path / "a")
    arguments = ["--author", ABOUT.author, "--license", ABOUT.license]
    result = CliRunner().invoke(app, ["label", path, *arguments])
    assert result.exit_code == 0, result.output
    assert "author: A. Author\nlicense: CC-BY-4.0\n" in result.output
    label(path, description=ABOUT.description, tags=ABOUT.tags)
    dataset = open_dataset(path)
    assert dataset.contents.metadata == ABOUT
    dataset.verify()
    card = dataset.card()
    for text in (ABOUT.author, ABOUT.license, ABOUT.description, "tests, small"):
        assert text in card
    with pytest.raises(TypeError, match="must be texts"):
        label(path, tags=[3])  # type: ignore[list-item]
    assert open_dataset(path).contents.metadata == ABOUT


def test_exports_have_the_metadata(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    dataset = write(tmp_path / "a", 0, ABOUT)
    export_dataset(dataset, tmp_path / "hub", "huggingface")
    card = (tmp_path / "hub" / "README.md").read_text()
    head, text = card.removeprefix("---\n").split("---\n", 1)
    assert f"license: {json.dumps(ABOUT.license)}\n" in head
    assert '- "tests"\n- "small"\n' in head
    assert ABOUT.description in text
    assert f"Author: {ABOUT.author}." in text


def test_a_dataset_that_is_being_written_is_not_labelled(tmp_path: Path) -> None:
    write(tmp_path / "a", 0)
    about = open_dataset(tmp_path / "a").contents.description
    with (
        Writer(tmp_path / "a", about),
        pytest.raises(BlockingIOError, match="being written"),
    ):
        label(tmp_path / "a", author="B")
