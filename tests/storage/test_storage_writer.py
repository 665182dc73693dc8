"""Batches that a writer reports as written are readable, even if it is killed."""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_journal import edit
from support.scripts import start_python
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.errors import ClosedError
from marl_collect.programs.interruption import Interruption
from marl_collect.storage import (
    BackgroundWriter,
    DatasetDescription,
    DatasetError,
    EpisodeWriter,
    RunDescription,
    Writer,
    open_dataset,
)
from marl_collect.storage.recording import RecordArguments, collect_into

FILES = {"journal.jsonl", "data-000000", ".lock"}


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


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_batches_survive_the_round_trip(tmp_path: Path) -> None:
    description, data = batches(max_frames_per_traj=6)
    write(tmp_path / "d", description, data)
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset) == 3
    for actual, expected in zip(dataset, data, strict=True):
        assert (actual == expected).all()
        assert actual.names == expected.names
        assert actual.batch_size == expected.batch_size
        for group in description.environment.groups:
            assert (
                actual["next", group].batch_size == expected["next", group].batch_size
            )
            assert actual[group].names == expected[group].names
    assert [b.shape for b in dataset[1:]] == [(2, 10), (2, 10)]


def test_reading_unpickles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = batches(1)
    write(tmp_path / "d", description, data)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for module in ("pickle", "_pickle", "torch"):
        monkeypatch.setattr(f"{module}.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    assert (open_dataset(tmp_path / "d")[0] == data[0]).all()
    assert names(tmp_path / "d") == FILES


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
    _, more_batches = batches(2, seed=1)
    write(tmp_path / "d", description, more_batches, seed=1)
    dataset = open_dataset(tmp_path / "d")
    assert [entry.run for entry in dataset.contents.batches] == [0, 0, 1, 1]
    assert [run.seed for run in dataset.contents.runs] == [0, 1]
    assert dataset.contents.totals.frames == 80
    for actual, expected in zip(dataset, [*data, *more_batches], strict=True):
        assert (actual == expected).all()


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
    with pytest.raises(
        FileExistsError, match=r"holds 'thesis.tex' but no journal\.jsonl"
    ):
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


def test_the_next_writer_cuts_off_what_a_killed_one_did_not_list(
    tmp_path: Path,
) -> None:
    description, data = batches(2)
    path = tmp_path / "d"
    write(path, description, data)
    size = (path / "data-000000").stat().st_size
    with (path / "data-000000").open("ab") as file:
        file.write(b"half a batch")
    with (path / "journal.jsonl").open("ab") as file:
        file.write(b"12345678 {")
    assert len(open_dataset(path)) == 2
    Writer(path, description).close()
    assert (path / "data-000000").stat().st_size == size
    write(path, description, data[:1])
    dataset = open_dataset(path)
    for actual, expected in zip(dataset, [*data, data[0]], strict=True):
        assert (actual == expected).all()
    dataset.verify()
    assert names(path) == FILES


def test_a_writer_that_was_killed_at_its_header_is_continued(tmp_path: Path) -> None:
    description, data = batches(1)
    for content in (b"", b"12345678 {"):
        path = tmp_path / str(len(content))
        path.mkdir()
        (path / "journal.jsonl").write_bytes(content)
        write(path, description, data)
        assert (open_dataset(path)[0] == data[0]).all()


KILLED = """
import sys
from marl_collect import Collector
from marl_collect.storage import DatasetDescription, RunDescription, Writer
from workloads.counting import CountingEnv

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
        reported = [after, *map(int, program.stdout.read().split())]
    dataset = open_dataset(path)
    assert len(dataset) in (reported[-1] + 1, reported[-1] + 2)
    collector = Collector([CountingEnv] * 2, frames_per_batch=200, seed=3)
    for actual, expected in zip(dataset, collector, strict=False):
        assert (actual == expected).all()
    episodes = sum(entry.episodes for entry in dataset.contents.batches)
    assert len(list(dataset.episodes())) == episodes == dataset.contents.totals.episodes
    description = DatasetDescription("counting", collector.description)
    write(path, description, [next(iter(collector))])
    assert len(open_dataset(path)) == len(dataset) + 1


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    description, data = batches(1)
    path = tmp_path / "d"
    write(path, description, data)
    edit(path, lambda e: e[0].update(format_version=99))
    with pytest.raises(DatasetError, match="this is format version 99"):
        open_dataset(path)
    with pytest.raises(DatasetError, match="this is format version 99"):
        Writer(path, description)
    edit(path, lambda e: e[0].update(format="other"))
    with pytest.raises(DatasetError, match="does not begin with the description"):
        open_dataset(path)
    with pytest.raises(FileNotFoundError, match=r"no journal\.jsonl"):
        open_dataset(tmp_path)


def test_a_full_disk_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, data = batches(2)
    write_bytes, room = os.write, [1000]

    def full(descriptor: int, content: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        n_written = write_bytes(descriptor, content[: room[0]])
        room[0] -= n_written
        return n_written

    with Writer(tmp_path / "d", description) as writer:
        writer.add(data[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space left"):
                writer.add(data[1])
        with pytest.raises(ClosedError, match="could not be written: .*No space left"):
            writer.add(data[1])
    assert (open_dataset(tmp_path / "d")[0] == data[0]).all()
    write(tmp_path / "d", description, data[1:])
    assert (open_dataset(tmp_path / "d")[1] == data[1]).all()


def test_the_background_writer_writes_in_order_and_reports_episodes(
    tmp_path: Path,
) -> None:
    description, data = batches(4, max_frames_per_traj=5)
    reported: list[Any] = []
    writer = Writer(tmp_path / "d", description)
    with BackgroundWriter(writer, reported.extend) as background:
        for batch in data:
            background.add(batch)
    dataset = open_dataset(tmp_path / "d")
    assert all((a == b).all() for a, b in zip(dataset, data, strict=True))
    assert reported == list(dataset.episodes())
    assert reported


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


def test_an_interruption_ends_a_recording_after_the_batch(tmp_path: Path) -> None:
    arguments = RecordArguments(
        tmp_path / "d",
        CountingEnv,
        frames_per_batch=20,
        frames=2000,
        max_frames_per_traj=5,
    )
    with Interruption() as interruption:

        def interrupt(_: Any) -> None:
            # In a thread of its own, which no signal interrupts.
            interruption.number = signal.SIGINT

        collect_into(arguments, on_episodes=interrupt, interruption=interruption)
    # The thread has a batch while the next one is collected.
    assert 1 <= len(open_dataset(tmp_path / "d")) <= 4


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


@contextlib.contextmanager
def failing(call: int) -> Iterator[None]:
    """Let a write fail after half of its bytes, or a sync after it is done.

    A batch of a new layout takes six calls: layout, data and entry are written and
    synced. The keys of the first batch take two more.
    """
    write_bytes, sync, calls = os.write, os.fdatasync, [0]

    def fail() -> bool:
        calls[0] += 1
        return calls[0] > call

    def half(descriptor: int, content: Any) -> int:
        if fail():
            write_bytes(descriptor, content[: len(content) // 2])
            raise OSError("broken disk")
        return write_bytes(descriptor, content)

    def after(descriptor: int) -> None:
        sync(descriptor)
        if fail():
            raise OSError("broken disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", half)
        patch.setattr(os, "fdatasync", after)
        with pytest.raises(OSError, match="broken disk"):
            yield


@pytest.mark.parametrize("call", range(6))
def test_an_error_closes_the_writer_and_another_one_goes_on(
    tmp_path: Path, call: int
) -> None:
    description, data = batches(4, frames=8)
    path = tmp_path / "d"
    with Writer(path, description) as writer:
        writer.add(data[0])
        with failing(call):
            writer.add(data[1])
        with pytest.raises(ClosedError, match="Open a new writer") as excinfo:
            writer.add(data[1])
        assert str(excinfo.value.__cause__) == "broken disk"
        assert writer.added.frames == 8
    dataset = open_dataset(path)
    listed = len(dataset)  # The line may be complete although the sync failed.
    assert listed == (2 if call == 5 else 1)
    assert all((a == b).all() for a, b in zip(dataset, data, strict=False))
    write(path, description, data[listed:])
    dataset = open_dataset(path)
    dataset.verify()
    assert all((a == b).all() for a, b in zip(dataset, data, strict=True))
    assert [entry.run for entry in dataset.contents.batches] == [
        *[0] * listed,
        *[1] * (4 - listed),
    ]


@pytest.mark.parametrize("call", range(8))
def test_no_folder_remains_if_the_first_batch_failed(tmp_path: Path, call: int) -> None:
    description, data = batches(1)
    with Writer(tmp_path / "d", description) as writer, failing(call):
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
        size = (tmp_path / "d" / "data-000000").stat().st_size
        writer.add(data[0].clone())  # The writer is still open.
        assert (tmp_path / "d" / "data-000000").stat().st_size > size
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset) == 2
    assert dataset.contents.totals.episodes == len(list(dataset.episodes()))


class BrokenDiskError(OSError):
    """A disk that fails once."""


@contextlib.contextmanager
def broken_disk() -> Iterator[None]:
    def fail(descriptor: int) -> None:
        raise BrokenDiskError("broken disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        yield


def test_pieces_made_by_set_truncated_are_not_listed_as_episodes(
    tmp_path: Path,
) -> None:
    description, data = batches(2, set_truncated=True)
    with Writer(tmp_path / "d", description) as writer:
        writer.add(data[0])
        with pytest.raises(ValueError, match="set_truncated=True causes"):
            writer.add(data[1])


@pytest.mark.parametrize("by_episode", [False, True])
def test_the_end_of_an_episode_without_its_beginning_is_not_listed(
    tmp_path: Path, by_episode: bool
) -> None:
    description, data = batches(3, max_frames_per_traj=7)
    writer = Writer(tmp_path / "d", description)
    with EpisodeWriter(writer, frames=1) if by_episode else writer as target:
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
