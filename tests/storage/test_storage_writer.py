"""Batches that a writer reports as written are readable, even if it is killed."""

import contextlib
import importlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import start_python
from tensordict import TensorDict

from marl_collect import Collector
from marl_collect.errors import ClosedError
from marl_collect.storage import (
    BackgroundWriter,
    DatasetDescription,
    EpisodeWriter,
    RunDescription,
    Writer,
    open_dataset,
)
from marl_collect.testing.counting import CountingEnv


def batches(n: int = 3, frames: int = 20, seed: int = 0, **options: Any) -> Any:
    collector = Collector(
        [CountingEnv] * 2,
        frames_per_batch=frames,
        total_frames=n * frames,
        seed=seed,
        **options,
    )
    description = DatasetDescription("counting", collector.description)
    return description, [batch.clone() for batch in collector]


def write(path: Path, description: DatasetDescription, data: Any, **run: Any) -> None:
    with Writer(path, description, RunDescription(**run)) as writer:
        for batch in data:
            writer.add(batch)


def test_batches_survive_the_round_trip(tmp_path: Path) -> None:
    description, data = batches(max_frames_per_traj=6)
    write(tmp_path / "d", description, data)
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset) == 3
    for found, expected in zip(dataset, data, strict=True):
        assert (found == expected).all()
        assert found.names == expected.names
        assert found.batch_size == expected.batch_size
        for group in description.environment.groups:
            assert found["next", group].batch_size == expected["next", group].batch_size
            assert found[group].names == expected[group].names
    assert [b.shape for b in dataset[1:]] == [(2, 10), (2, 10)]


def test_a_batch_folder_opens_with_tensordict_alone_and_unpickles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = batches(1)
    write(tmp_path / "d", description, data)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for module in ("pickle", "_pickle", "torch"):
        monkeypatch.setattr(f"{module}.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    loaded = TensorDict.load_memmap(tmp_path / "d" / "batch-000000")
    assert (loaded == data[0]).all()
    assert (open_dataset(tmp_path / "d")[0] == data[0]).all()
    files = {path.suffix for path in (tmp_path / "d").rglob("*") if path.is_file()}
    assert files == {".memmap", ".json", ""}  # "" is the suffix of the lock.


def test_writing_into_a_loaded_batch_changes_no_file(tmp_path: Path) -> None:
    description, data = batches(1)
    write(tmp_path / "d", description, data)
    group = next(iter(description.environment.groups))
    open_dataset(tmp_path / "d")[0][group, "observation"].fill_(77)
    assert (open_dataset(tmp_path / "d")[0] == data[0]).all()


def test_the_description_survives_the_round_trip(tmp_path: Path) -> None:
    description, data = batches(1)
    description = DatasetDescription(
        "counting", description.environment, {"observations": ["RGB"], "n": 3}
    )
    write(tmp_path / "d", description, data, seed=5, policy={"kind": "random"})
    contents = open_dataset(tmp_path / "d").contents
    assert contents.description == description
    assert contents.runs[0].seed == 5
    assert contents.runs[0].policy == {"kind": "random"}
    assert contents.runs[0].versions["torch"] == torch.__version__
    keys = {field.key: field for field in contents.keys}
    for key, leaf in description.environment.observed().items():
        assert keys[key].shape == leaf.shape
        assert keys["next", *key].dtype == leaf.dtype.name


def test_appending_continues_after_the_last_run(tmp_path: Path) -> None:
    description, data = batches(2, seed=0)
    write(tmp_path / "d", description, data, seed=0)
    _, more = batches(2, seed=1)
    write(tmp_path / "d", description, more, seed=1)
    dataset = open_dataset(tmp_path / "d")
    assert [entry.run for entry in dataset.contents.batches] == [0, 0, 1, 1]
    assert [run.seed for run in dataset.contents.runs] == [0, 1]
    assert dataset.contents.totals.frames == 80
    for found, expected in zip(dataset, [*data, *more], strict=True):
        assert (found == expected).all()


def test_appending_to_a_dataset_of_another_kind_names_the_difference(
    tmp_path: Path,
) -> None:
    description, data = batches(1)
    write(tmp_path / "d", description, data)
    other = DatasetDescription("counting", description.environment, {"n": 3})
    with pytest.raises(ValueError, match="env_kwargs/n is None there, but 3 here"):
        Writer(tmp_path / "d", other)
    _, longer = batches(1, max_frames_per_traj=5)
    with (
        Writer(tmp_path / "d", description) as writer,
        pytest.raises(ValueError, match="step_count is .* in the dataset missing"),
    ):
        writer.add(longer[0])
    assert len(open_dataset(tmp_path / "d")) == 1


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    description, _ = batches(1)
    with pytest.raises(FileExistsError, match="holds 'thesis.tex' but no index.json"):
        Writer(tmp_path, description)
    with pytest.raises(FileExistsError, match="is a file"):
        Writer(tmp_path / "thesis.tex", description)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    description, data = batches(1)
    with Writer(tmp_path / "d", description) as writer:
        writer.add(data[0])
        with pytest.raises(BlockingIOError, match="being written to"):
            Writer(tmp_path / "d", description)
    Writer(tmp_path / "d", description).close()
    with pytest.raises(ClosedError):
        writer.add(data[0])


def test_a_writer_that_added_nothing_leaves_no_folder(tmp_path: Path) -> None:
    description, _ = batches(1)
    Writer(tmp_path / "d", description).close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_writer_removes_unlisted_batches_of_a_killed_one(
    tmp_path: Path,
) -> None:
    description, data = batches(2)
    path = tmp_path / "d"
    write(path, description, data)
    index = (path / "index.json").read_text()
    (path / ".incomplete").mkdir()
    (path / ".incomplete" / "done.memmap").write_bytes(b"half")
    data[0].memmap(str(path / "batch-000002"))  # Renamed, but not yet listed.
    (path / "index.json.new").write_text(index[:100])
    assert len(open_dataset(path)) == 2
    write(path, description, data[:1])
    dataset = open_dataset(path)
    for found, expected in zip(dataset, [*data, data[0]], strict=True):
        assert (found == expected).all()
    names = {entry.name for entry in path.iterdir()}
    assert names == {"index.json", ".lock", *(f"batch-00000{i}" for i in range(3))}


KILLED = """
import sys
from marl_collect import Collector
from marl_collect.storage import DatasetDescription, RunDescription, Writer
from marl_collect.testing.counting import CountingEnv

collector = Collector([CountingEnv] * 2, frames_per_batch=200, seed=3)
description = DatasetDescription("counting", collector.description)
writer = Writer(sys.argv[1], description, RunDescription(seed=3))
for number, batch in enumerate(collector):
    writer.add(batch)
    print(number, flush=True)  # From here on it must be readable.
"""


@pytest.mark.parametrize("after", [1, 6])
def test_everything_reported_as_written_survives_a_kill(
    tmp_path: Path, after: int
) -> None:
    path = tmp_path / "d"
    with start_python("-c", KILLED, path) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if int(line) == after:
                break
        time.sleep(0.003 * after)  # noqa: TID251 - to kill it in different places of a write
        program.kill()
        said = [after, *map(int, program.stdout.read().split())]
    dataset = open_dataset(path)
    assert len(dataset) in (said[-1] + 1, said[-1] + 2)
    collector = Collector([CountingEnv] * 2, frames_per_batch=200, seed=3)
    for found, expected in zip(dataset, collector, strict=False):
        assert (found == expected).all()
    episodes = sum(entry.episodes for entry in dataset.contents.batches)
    assert len(list(dataset.episodes())) == episodes == dataset.contents.totals.episodes
    description = DatasetDescription("counting", collector.description)
    write(path, description, [next(iter(collector))])
    assert len(open_dataset(path)) == len(dataset) + 1


def test_an_index_of_another_format_is_refused(tmp_path: Path) -> None:
    description, data = batches(1)
    write(tmp_path / "d", description, data)
    index = tmp_path / "d" / "index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        open_dataset(tmp_path / "d")
    content["batches"][0]["name"] = "../../etc"
    content["checksum"] = None
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not batch-NNNNNN"):
        open_dataset(tmp_path / "d")
    index.write_text("{}")
    with pytest.raises(ValueError, match="not an index of a dataset"):
        open_dataset(tmp_path / "d")
    with pytest.raises(FileNotFoundError, match=r"no index\.json"):
        open_dataset(tmp_path)


def test_a_full_disk_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = batches(2)
    with Writer(tmp_path / "d", description) as writer:
        writer.add(data[0])
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
        with pytest.raises(
            OSError, match="is full: 1 batches are complete, the next has"
        ):
            writer.add(data[1])
    assert (open_dataset(tmp_path / "d")[0] == data[0]).all()


def test_the_background_writer_writes_in_order_and_reports_episodes(
    tmp_path: Path,
) -> None:
    description, data = batches(4, max_frames_per_traj=5)
    told: list[Any] = []
    writer = Writer(tmp_path / "d", description)
    with BackgroundWriter(writer, told.extend) as background:
        for batch in data:
            background.add(batch)
    dataset = open_dataset(tmp_path / "d")
    assert all((a == b).all() for a, b in zip(dataset, data, strict=True))
    assert told == list(dataset.episodes())
    assert told


def test_an_error_in_the_background_is_raised_to_the_caller(tmp_path: Path) -> None:
    description, data = batches(1)
    _, other = batches(1, max_frames_per_traj=5)
    background = BackgroundWriter(Writer(tmp_path / "d", description))
    background.add(data[0])
    background.add(other[0])
    with pytest.raises(ValueError, match="does not fit the dataset"):
        background.add(data[0])
    background.close()
    assert len(open_dataset(tmp_path / "d")) == 1


def test_types_that_json_changes_do_not_prevent_appending(tmp_path: Path) -> None:
    description, data = batches(1)
    kwargs = {"size": (5, 5), "weights": {1: (0.5, None)}}
    description = DatasetDescription("counting", description.environment, kwargs)
    write(tmp_path / "d", description, data)
    write(tmp_path / "d", description, data)
    assert len(open_dataset(tmp_path / "d")) == 2
    other = DatasetDescription("counting", description.environment, {"size": (5, 6)})
    with pytest.raises(ValueError, match=r"size is \[5, 5\] there, but \[5, 6\] here"):
        Writer(tmp_path / "d", other)


STEPS = [
    "files.sync_tree",  # before the batch is renamed
    "writer.rename_synced",  # before it is listed
    "index.write_atomically",  # after it is listed
]


@contextlib.contextmanager
def failing(step: str) -> Iterator[None]:
    """Make a step of ``Writer.add`` raise an error after it has done its work."""
    module, name = step.split(".")
    owner = importlib.import_module(f"marl_collect.storage.{module}")
    work = getattr(owner, name)

    def fail(*args: Any) -> None:
        work(*args)
        raise OSError("broken disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="broken disk"):
            yield


@pytest.mark.parametrize("step", STEPS)
def test_a_batch_may_be_added_again_after_an_error(tmp_path: Path, step: str) -> None:
    description, data = batches(4, frames=8)
    write(tmp_path / "expected", description, data)
    expected = open_dataset(tmp_path / "expected")
    assert any(e.length > e.frame + 1 for e in expected.episodes())
    with Writer(tmp_path / "d", description) as writer:
        for batch in data:
            with failing(step):
                writer.add(batch)
            writer.add(batch)
        assert writer.added == expected.contents.totals
    found = open_dataset(tmp_path / "d")
    assert found.contents.totals == expected.contents.totals
    assert list(found.episodes()) == list(expected.episodes())
    assert all((a == b).all() for a, b in zip(found, data, strict=True))


@pytest.mark.parametrize("step", STEPS[1:])
def test_no_folder_remains_if_the_first_batch_failed(tmp_path: Path, step: str) -> None:
    description, data = batches(1)
    with Writer(tmp_path / "d", description) as writer, failing(step):
        writer.add(data[0])
    assert list(tmp_path.iterdir()) == []


def test_a_return_that_is_not_finite_is_refused_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    description, data = batches(2, max_frames_per_traj=5)
    data[1]["next", "hunter", "reward"][1, 0, 1] = float("nan")
    with Writer(tmp_path / "d", description) as writer:
        writer.add(data[0])
        with pytest.raises(ValueError, match="Agent 1 .*'hunter' .* nan .* row 1"):
            writer.add(data[1])
        assert not (tmp_path / "d" / "batch-000001").exists()
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset) == 1
    assert dataset.contents.totals.episodes == len(list(dataset.episodes()))


class BrokenDiskError(OSError):
    """A disk that fails once."""


@contextlib.contextmanager
def broken_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:

        def fail(*args: Any) -> None:
            raise BrokenDiskError("broken disk")

        patch.setattr("marl_collect.storage.files.sync_tree", fail)
        yield


def complete_episodes(data: list[TensorDict]) -> list[tuple[int, int]]:
    """Id and length of each episode whose frames are all in ``data``."""
    found = []
    for row in torch.cat(data, 1).unbind(0):
        ids = row["collector", "traj_ids"]
        for number in ids.unique().tolist():
            episode = row[ids == number]
            if episode["next", "done"][-1]:
                found.append((number, len(episode)))
    return sorted(found)


@pytest.mark.parametrize("ids", [True, False])
def test_episodes_that_cross_a_missing_batch_are_not_listed(
    tmp_path: Path, *, ids: bool
) -> None:
    description, data = batches(12, frames=8)
    whole = complete_episodes(data)
    crossing = {
        int(row[t])
        for b in (4, 5, 9)
        for row in data[b]["collector", "traj_ids"]
        for t in range(4)
    }
    kept = [batch for b, batch in enumerate(data) if b not in (4, 5, 9)]
    expected = [episode for episode in whole if episode[0] not in crossing]
    assert 0 < len(expected) < len(whole)
    if not ids:
        data = [batch.exclude("collector") for batch in data]
        kept = [batch for b, batch in enumerate(data) if b not in (4, 5, 9)]
    with Writer(tmp_path / "d", description) as writer:
        for number, batch in enumerate(data):
            if number in (4, 5, 9):
                with broken_disk(), pytest.raises(BrokenDiskError):
                    writer.add(batch)
            else:
                writer.add(batch)
    dataset = open_dataset(tmp_path / "d")
    assert all((a == b).all() for a, b in zip(dataset, kept, strict=True))
    lengths = sorted(dataset.trajectories.lengths.tolist())
    if ids:
        found = [
            (int(t["collector", "traj_ids"][0]), len(t)) for t in dataset.trajectories
        ]
        assert sorted(found) == expected
    else:  # This includes episodes that begin with the batch after the missing one.
        assert len(lengths) <= len(expected)
        assert not set(lengths) - {length for _, length in expected}
    for episode in dataset.trajectories:
        assert episode["next", "done"].sum() == 1


def test_pieces_made_by_set_truncated_are_not_listed_as_episodes(
    tmp_path: Path,
) -> None:
    description, data = batches(2, set_truncated=True)
    with Writer(tmp_path / "d", description) as writer:
        writer.add(data[0])
        with pytest.raises(ValueError, match="set_truncated=True causes"):
            writer.add(data[1])


@pytest.mark.parametrize("whole", [False, True])
def test_the_end_of_an_episode_without_its_beginning_is_not_listed(
    tmp_path: Path, whole: bool
) -> None:
    description, data = batches(3, max_frames_per_traj=7)
    writer = Writer(tmp_path / "d", description)
    with EpisodeWriter(writer, frames=1) if whole else writer as target:
        for batch in data[1:]:  # The collector was running before.
            target.add(batch)
    trajectories = open_dataset(tmp_path / "d").trajectories
    assert len(trajectories)
    for episode in trajectories:
        assert episode["step_count"].flatten().tolist() == list(range(len(episode)))


def test_a_background_writer_that_failed_or_closed_accepts_no_batch(
    tmp_path: Path,
) -> None:
    description, data = batches(3)
    writer = Writer(tmp_path / "d", description)
    writer.add(data[0])
    background = BackgroundWriter(writer)
    with broken_disk():
        background.add(data[1])
        for _ in range(2):
            with pytest.raises(BrokenDiskError):
                background.add(data[2])
    with pytest.raises(BrokenDiskError):
        background.add(data[2])
    background.close()
    background.close()
    with pytest.raises(ClosedError, match="is closed"):
        background.add(data[2])
    assert len(open_dataset(tmp_path / "d")) == 1
    other = BackgroundWriter(Writer(tmp_path / "e", description))
    with broken_disk():
        other.add(data[0])
        with pytest.raises(BrokenDiskError):
            other.close()
    other.close()


def test_nobody_else_can_open_the_lock(tmp_path: Path) -> None:
    """Who can open a file can lock it, and so block its writer."""
    description, data = batches(1)
    before = os.umask(0)
    try:
        with Writer(tmp_path / "d", description) as writer:
            writer.add(data[0])
            assert (tmp_path / "d" / ".lock").stat().st_mode & 0o777 == 0o600
        (tmp_path / "d" / ".lock").chmod(0o644)  # As older versions made it.
        with Writer(tmp_path / "d", description):
            assert (tmp_path / "d" / ".lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
