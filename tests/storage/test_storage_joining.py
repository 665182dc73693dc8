"""Several datasets read like one, as a view and after a merge."""

import itertools
import os
import shutil
import signal
from ctypes import c_int64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from storage_fuzz import batches, read_all, same, write
from storage_journal import extent, flip
from support.scripts import run_python
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    DatasetError,
    RunDescription,
    Writer,
    appending,
    concatenate,
    files,
    merge,
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


@pytest.fixture(params=["view", "merged"])
def joined(
    request: pytest.FixtureRequest, datasets: list[Dataset], tmp_path: Path
) -> Dataset:
    if request.param == "view":
        return concatenate(datasets)
    return merge([dataset.path for dataset in datasets], tmp_path / "all")


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


@pytest.mark.parametrize("supported", [True, False])
def test_the_disk_writes_while_a_merge_reads(
    datasets: list[Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    supported: bool,
) -> None:
    ranges: list[tuple[int, int]] = []

    class Library:
        def __init__(self, _: Any) -> None:
            if supported:
                self.sync_file_range = self._note

        def _note(self, file: int, begin: Any, size: Any, _: int) -> None:
            assert os.fstat(file).st_size >= begin.value + size.value
            ranges.append((begin.value, begin.value + size.value))

    monkeypatch.setattr(files, "ctypes", SimpleNamespace(CDLL=Library, c_int64=c_int64))
    monkeypatch.setattr(appending, "_WRITE_BACK", 1000)
    merged = merge(datasets, tmp_path / "all")
    merged.verify()
    assert len(ranges) > 1 or not supported
    # Each range begins where the one before it ended.
    for (_, end), (begin, _) in itertools.pairwise([(0, 0), *ranges]):
        assert begin == end


def test_a_view_of_a_view_has_all_folders(datasets: list[Dataset]) -> None:
    view = concatenate([concatenate(datasets[:2]), datasets[2]])
    assert [folder.path for folder, _ in view.parts] == [d.path for d in datasets]
    assert str(datasets[1].path) in repr(view)
    assert str(datasets[1].path) in repr(view.transitions)
    with pytest.raises(ValueError, match="has 3 folders, not one"):
        _ = view.path


def test_a_merged_dataset_can_be_appended_to(
    datasets: list[Dataset], tmp_path: Path
) -> None:
    merged = merge(datasets[1:], tmp_path / "all")
    appended = add(tmp_path / "all", 9)
    assert len(appended) == len(merged) + 3
    assert len(list(appended.episodes())) == appended.contents.totals.episodes
    appended.verify()


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
    for join in (concatenate, lambda d: merge(d, tmp_path / "all")):
        with pytest.raises(ValueError, match=message) as error:
            join([datasets[0], different])
        assert str(different) in str(error.value)
        assert str(datasets[0].path) in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_nothing_to_join_is_an_error(datasets: list[Dataset]) -> None:
    nothing: list[Any] = [[], "folder", datasets[0]]
    for sources in nothing:
        with pytest.raises(ValueError, match="must be a list of datasets"):
            concatenate(sources)


def test_a_merge_refuses_what_is_in_its_place(
    datasets: list[Dataset], tmp_path: Path
) -> None:
    (tmp_path / "all").mkdir()
    merge(datasets[1:], tmp_path / "all")  # An empty folder is filled.
    with pytest.raises(FileExistsError, match="all exists: merge to a new"):
        merge(datasets[1:], tmp_path / "all")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="link exists"):
        merge(datasets[1:], tmp_path / "link")


def test_a_merge_refuses_datasets_that_are_being_written(
    datasets: list[Dataset], tmp_path: Path
) -> None:
    description, data = batches(1, 5)
    with Writer(tmp_path / "open", description) as writer:
        writer.add(data[0])
        with pytest.raises(BlockingIOError, match="open is being written to"):
            merge([datasets[0], tmp_path / "open"], tmp_path / "all")
        assert len(concatenate([datasets[0], tmp_path / "open"])) == 5
    merge([datasets[0], tmp_path / "open"], tmp_path / "all")


def test_read_only_datasets_are_merged(datasets: list[Dataset], tmp_path: Path) -> None:
    source = tmp_path / "read-only"
    shutil.copytree(datasets[1].path, source)
    (source / ".lock").unlink(missing_ok=True)
    for path in [source, *source.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        assert len(merge([source, datasets[2]], tmp_path / "all")) == 6
    finally:
        for path in [source, *source.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)


@pytest.mark.parametrize("part", ["offset", "packed_at"])
def test_damage_is_not_merged(
    datasets: list[Dataset], tmp_path: Path, part: str
) -> None:
    source = shutil.copytree(datasets[1].path, tmp_path / "damaged")
    path, parts = extent(source, 1)
    flip(path, getattr(parts, part) + 5)
    with pytest.raises(DatasetError, match="is damaged") as error:
        merge([datasets[0], source], tmp_path / "all")
    assert str(path) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_an_error_while_writing_leaves_nothing(
    datasets: list[Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        merge(datasets, tmp_path / "all")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from marl_collect.storage import merge

sources, target, place, count = sys.argv[1:-3], *sys.argv[-3:]
owner, name = {"write": (os, "write"), "rename": (Path, "rename")}[place]
real, calls = getattr(owner, name), [0]

def call(*arguments):
    calls[0] += 1
    if calls[0] == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)

setattr(owner, name, call)
merge(sources, target)
"""


@pytest.mark.parametrize(
    ("place", "count"), [("write", 1), ("write", 9), ("rename", 1)]
)
def test_a_killed_merge_leaves_no_dataset(
    datasets: list[Dataset], tmp_path: Path, place: str, count: int
) -> None:
    sources = [str(dataset.path) for dataset in datasets]
    target = tmp_path / "all"
    process = run_python("-c", KILLED, *sources, target, place, str(count))
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    assert os.listdir(tmp_path) == [".all.incomplete"]
    merged = merge(datasets, target)  # The next one cleans up.
    assert os.listdir(tmp_path) == ["all"]
    merged.verify()
    assert len(merged) == 10


def test_merging_on_the_command_line(datasets: list[Dataset], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from marl_collect.cli.main import app

    paths = [str(dataset.path) for dataset in datasets]
    out = tmp_path / "all"
    result = CliRunner().invoke(app, ["merge", *paths, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "200 frames" in result.output
    runs = [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [entry.run for entry in open_dataset(out).contents.batches] == runs
    result = CliRunner().invoke(app, ["merge", *paths, "--out", str(out)])
    assert result.exit_code == 2
    assert "merge to a new or empty folder" in " ".join(result.output.split())
