"""What was listed is read after a crash at any byte, and the next writer goes on."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_fuzz import batches, read_all, same
from storage_journal import extent
from support.scripts import start_python
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.storage import DatasetDescription, Writer

DATA, JOURNAL = "data-000000", "journal.jsonl"
Recording = tuple[Path, DatasetDescription, list[TensorDict]]


@pytest.fixture(scope="module", params=["vectors", "images"])
def recording(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    """A dataset of two batches and their data; the second begins a new layout."""
    path = tmp_path_factory.mktemp("torn") / "d"
    if request.param == "images":
        description, data = batches(3)
    else:
        collector = Collector(CountingEnv, frames_per_batch=8, total_frames=24)
        description = DatasetDescription("c", collector.description)
        data = [batch.clone() for batch in collector]
    with Writer(path, description) as writer:
        for batch in data[:2]:
            writer.add(batch)
    return path, description, data


def append(path: Path, description: DatasetDescription, batch: TensorDict) -> None:
    with Writer(path, description) as writer:
        writer.add(batch)


def test_a_write_that_was_torn_in_the_journal(
    recording: Recording, tmp_path: Path
) -> None:
    source, _, data = recording
    path = shutil.copytree(source, tmp_path / "d")
    journal = (source / JOURNAL).read_bytes()
    lines = journal.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if b'{"batch"' in line) + 1
    begin = len(b"".join(lines[:first]))  # Behind the line of the first batch.
    end = len(journal)
    for cut in (
        *range(begin, begin + 12),
        *range(begin, end - 5, 7),
        *range(end - 5, end + 1),
    ):
        (path / JOURNAL).write_bytes(journal[:cut])
        dataset = open_dataset(path)
        assert len(dataset) == 1 + (cut == end)
        if not cut % 50:
            assert same(dataset[:], data[:1])


def test_a_writer_goes_on_after_a_torn_journal(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)  # Faster.
    source, description, data = recording
    journal = (source / JOURNAL).read_bytes()
    begin = journal.index(b'{"batch"')
    draw = random.Random(0)
    cuts = {*range(begin - 12, begin + 3), *range(len(journal) - 3, len(journal))}
    for cut in sorted({*cuts, *draw.sample(range(begin, len(journal)), 8)}):
        path = tmp_path / str(cut)
        shutil.copytree(source, path)
        os.truncate(path / JOURNAL, cut)
        listed = len(open_dataset(path))
        lines = journal[:cut].split(b"\n")[:-1]
        assert listed == sum(b'{"batch"' in line for line in lines)
        append(path, description, data[2])
        dataset = open_dataset(path)
        dataset.verify()
        assert same(dataset[:], [*data[:listed], data[2]])
        assert (path / DATA).stat().st_size == extent(path, listed)[1].end
        shutil.rmtree(path)


def test_a_write_that_was_torn_in_the_data(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is listed after its data, so a torn batch is not listed."""
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    source, description, data = recording
    lines = (source / JOURNAL).read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if b'{"batch"' in line) + 1
    begin = extent(source, 1)[1].offset
    end = (source / DATA).stat().st_size
    draw = random.Random(1)
    some = draw.sample(range(begin, end), 10)
    for cut in sorted({begin, begin + 1, end - 1, end, *some}):
        path = tmp_path / str(cut)
        shutil.copytree(source, path)
        (path / JOURNAL).write_bytes(b"".join(lines[:first]))
        os.truncate(path / DATA, cut)
        assert same(open_dataset(path)[:], data[:1])
        append(path, description, data[2])
        assert same(open_dataset(path)[:], [data[0], data[2]])
        shutil.rmtree(path)


def test_a_reader_that_is_open_stays_right_while_the_rest_is_cut_off(
    recording: Recording, tmp_path: Path
) -> None:
    source, description, data = recording
    path = shutil.copytree(source, tmp_path / "d")
    with (path / DATA).open("ab") as file:
        file.write(bytes(100_000))
    dataset = open_dataset(path)
    expected = read_all(dataset)
    append(path, description, data[2])
    assert same(read_all(dataset), expected)
    assert same(open_dataset(path)[:], data)


KILLED = """
import os, signal, sys
from marl_collect.storage import Writer, open_dataset

path, size, call = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
dataset = open_dataset(path)
batches = dataset[:]
write, sync, calls = os.write, os.fdatasync, [0]

def count():
    calls[0] += 1
    return calls[0] == call

def partly(descriptor, content):
    if descriptor > 2 and count():
        write(descriptor, content[: int(size * len(content))])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, content)

def before(descriptor):
    if count():
        os.kill(os.getpid(), signal.SIGKILL)
    sync(descriptor)

os.write, os.fdatasync = partly, before
writer = Writer(path, dataset.contents.description)
for number in range(100):
    writer.add(batches[number % 2])
    print(number, flush=True)
"""


@pytest.mark.parametrize(
    ("size", "call"), [(0.0, 2), (0.5, 3), (1.0, 5), (0.99, 7), (0.3, 9), (0.5, 10)]
)
def test_a_writer_killed_anywhere_in_an_add_keeps_what_it_acknowledged(
    recording: Recording, tmp_path: Path, size: float, call: int
) -> None:
    source, description, data = recording
    path = shutil.copytree(source, tmp_path / "d")
    with start_python("-c", KILLED, path, str(size), str(call)) as program:
        assert program.stdout is not None
        acknowledged = len(program.stdout.read().split())
    assert program.returncode == -9
    dataset = open_dataset(path)
    dataset.verify()
    assert len(dataset) - 2 in (acknowledged, acknowledged + 1)
    assert same(dataset[:], [data[i % 2] for i in range(len(dataset))])
    append(path, description, data[2])
    reopened: Any = open_dataset(path)[:]
    assert same(reopened, [*dataset[:], data[2]])
    assert torch.equal(reopened[-1]["done"], data[2]["done"])
