"""Reading a damaged dataset raises an error that names the file and changes nothing."""

import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage_fuzz import read_all, same
from storage_journal import Entries, edit, extent, flip, forge, forge_notes, notes, only
from support.scripts import start_python
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector, open_dataset
from marl_collect.buffers.layout import VALID
from marl_collect.storage import DatasetDescription, DatasetError, Writer
from marl_collect.storage.checks import Folder
from marl_collect.storage.episodes import EpisodeTable
from marl_collect.storage.index import JOURNAL, Index
from marl_collect.storage.records import Column

DATA = "data-000000"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two runs whose episodes cross batches."""
    path = tmp_path_factory.mktemp("data") / "d"
    for seed in (0, 1):
        collector = Collector(
            [CountingEnv] * 2, frames_per_batch=20, total_frames=60, seed=seed
        )
        with Writer(path, DatasetDescription("c", collector.description)) as writer:
            for batch in collector:
                writer.add(batch)
    return path


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(intact, tmp_path / "d", symlinks=True)


def digests(folder: Path) -> dict[str, str]:
    """The content of every file and the target of every link."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            hashes[str(path)] = str(path.readlink())
        elif path.is_file():
            hashes[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def read_refuses(folder: Path, file_name: str, message: str | None = None) -> None:
    """Every read that needs the file raises an error, and no file changes."""
    before = digests(folder.parent)
    with pytest.raises(DatasetError, match=message) as excinfo:
        read_all(open_dataset(folder))
    assert file_name in str(excinfo.value)
    assert digests(folder.parent) == before


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99])
def test_a_data_file_that_is_too_short_is_named_and_not_changed(
    copy: Path, share: float
) -> None:
    size = int(share * (copy / DATA).stat().st_size)
    os.truncate(copy / DATA, size)
    read_refuses(copy, DATA, f"has {size:,} bytes, but the journal lists")
    dataset = open_dataset(copy)
    for read in (lambda: dataset[1], lambda: dataset.transitions[:]):
        with pytest.raises(DatasetError, match=f"{DATA} has"):
            read()


def test_bytes_behind_the_listed_ones_have_no_effect(copy: Path, intact: Path) -> None:
    for name in (DATA, JOURNAL):  # As a writer leaves them that was killed.
        with (copy / name).open("ab") as file:
            file.write(b"half a")
    before = digests(copy)
    assert same(read_all(open_dataset(copy)), read_all(open_dataset(intact)))
    assert digests(copy) == before


def test_other_batches_than_the_damaged_one_are_read(copy: Path) -> None:
    path, parts = extent(copy, 1)
    flip(path, parts.offset + 40)
    dataset = open_dataset(copy)
    with pytest.raises(DatasetError, match=f"{DATA} is damaged: .* of batch 1 is"):
        _ = dataset[1]
    for batch in (0, 2, 5):
        assert dataset[batch].shape == (2, 10)
        dataset.verify(batch)
    key = ("hunter", "observation")
    assert len(dataset.transitions.select(key)[40:]) == 80
    read_refuses(copy, DATA, "is damaged")


@pytest.mark.parametrize("name", [DATA, JOURNAL])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    if name == JOURNAL:
        with pytest.raises(FileNotFoundError, match=r"there is no journal\.jsonl in"):
            open_dataset(copy)
    else:
        read_refuses(copy, name, "is missing")


@pytest.mark.parametrize("name", [DATA, JOURNAL])
def test_links_are_not_followed(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    read_refuses(copy, name, "is a symbolic link")


@pytest.mark.parametrize("name", [DATA, JOURNAL])
def test_a_pipe_in_place_of_a_file_does_not_block(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    read_refuses(copy, name, "is not a regular file")


def test_reading_needs_no_write_permission_and_writes_stay_in_memory(
    copy: Path,
) -> None:
    before = digests(copy)
    for path in [*copy.rglob("*"), copy]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    dataset = open_dataset(copy)
    expected = dataset.transitions[:]
    for batch in dataset:
        for tensor in batch.flatten_keys().values():
            tensor.fill_(1)
    assert same(dataset.transitions[:], expected)
    assert digests(copy) == before
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o755)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]x\n", b"\xff\xfe\x00\n", b"null\n", b"7\n", b"[" * 100_000],
)
def test_a_file_that_is_no_journal_is_named(copy: Path, content: bytes) -> None:
    (copy / JOURNAL).write_bytes(content)
    read_refuses(copy, JOURNAL, "it does not begin with|line 1 is damaged")
    before = digests(copy)
    with pytest.raises(DatasetError, match=JOURNAL):
        Writer(copy, _description())
    assert digests(copy) == before  # Above all, no data is cut off.


def _description() -> DatasetDescription:
    collector = Collector([CountingEnv] * 2, frames_per_batch=20)
    return DatasetDescription("c", collector.description)


@pytest.mark.parametrize("content", ["null", "7", "[]", "{}", "[" * 100_000, "x"])
@pytest.mark.parametrize("line", [0, 2, 4])
def test_lines_without_an_entry_are_named(copy: Path, content: str, line: int) -> None:
    lines = (copy / JOURNAL).read_bytes().split(b"\n")[:-1]
    lines[line] = b"12345678 " + content.encode()
    checksum = 0
    for number, old in enumerate(lines):
        checksum = zlib.crc32(old[9:], checksum)
        lines[number] = b"%08x %s" % (checksum, old[9:])
    (copy / JOURNAL).write_bytes(b"".join(line + b"\n" for line in lines))
    read_refuses(copy, JOURNAL)


def key(entries: Entries) -> Any:
    """The first key."""
    return only("keys", entries)[0][0]


def batch(entries: Entries, number: int = 0) -> Any:
    """The entry of a batch."""
    return only("batch", entries)[number]


def layout(entries: Entries) -> Any:
    """The first layout."""
    return only("layout", entries)[0]


def drop(entries: Entries, kind: str, number: int = 0) -> None:
    """Remove an entry."""
    entries.remove([entry for entry in entries if kind in entry][number])


WRONG: dict[str, Callable[[Entries], Any]] = {
    "absolute key": lambda e: key(e).update(key=["/etc/passwd"]),
    "key that climbs": lambda e: key(e).update(key=["..", "x"]),
    "key that climbs inside": lambda e: key(e).update(key=["a/../../x"]),
    "empty key": lambda e: key(e).update(key=[]),
    "empty part": lambda e: key(e).update(key=[""]),
    "key of numbers": lambda e: key(e).update(key=[1]),
    "key that is text": lambda e: key(e).update(key="done"),
    "key twice": lambda e: only("keys", e)[0].append(key(e)),
    "key below a key": lambda e: only("keys", e)[0].append(
        key(e) | {"key": [*key(e)["key"], "x"]}
    ),
    "missing key": lambda e: only("keys", e)[0].pop(),
    "no keys": lambda e: drop(e, "keys"),
    "keys twice": lambda e: e.append(next(entry for entry in e if "keys" in entry)),
    "module as dtype": lambda e: key(e).update(dtype="hub"),
    "unknown dtype": lambda e: key(e).update(dtype="float31"),
    "number as dtype": lambda e: key(e).update(dtype=3),
    "other dtype": lambda e: key(e).update(dtype="int8"),
    "negative shape": lambda e: key(e).update(shape=[-1, -1]),
    "huge shape": lambda e: key(e).update(shape=[10**30]),
    "other shape": lambda e: key(e).update(shape=[2]),
    "batch twice": lambda e: e.append(e[-1]),
    "batches out of order": lambda e: e.extend([e.pop(4), e.pop(4)][::-1]),
    "batch removed": lambda e: drop(e, "batch", 1),
    "first batch removed": lambda e: drop(e, "batch"),
    "batch elsewhere": lambda e: batch(e, -1).update(offset=7),
    "batch in no file": lambda e: batch(e, -1).update(segment=77),
    "wrong frames": lambda e: batch(e).update(frames=7),
    "too many frames": lambda e: batch(e).update(frames=21),
    "frames as text": lambda e: batch(e).update(frames="20"),
    "frames as bool": lambda e: batch(e).update(frames=True),
    "wrong batch shape": lambda e: batch(e).update(shape=[1, 10]),
    "turned batch shape": lambda e: batch(e).update(shape=[2, 10, 1]),
    "wrong run": lambda e: batch(e).update(run=5),
    "wrong episodes": lambda e: batch(e).update(episodes=0),
    "too many episodes": lambda e: batch(e).update(episodes=21),
    "wrong tails": lambda e: batch(e, -1).update(tails=0),
    "too many tails": lambda e: batch(e, -1).update(tails=21),
    "wrong notes": lambda e: batch(e, -1).update(notes=1),
    "wrong checksum": lambda e: batch(e, -1).update(checksum=1),
    "packed keys that are none": lambda e: batch(e).update(packed=[["lz4", 1]]),
    "no returns": lambda e: batch(e).update(return_sums={}),
    "returns of other agents": lambda e: batch(e, 1)["return_sums"]["prey"].pop(),
    "returns as text": lambda e: batch(e)["return_sums"].update(prey="abc"),
    "no entry": lambda e: batch(e).pop("checksum"),
    "unknown layout": lambda e: batch(e).update(layout=50),
    "layout of other keys": lambda e: layout(e).update(packed=[["x"]]),
    "next key without a root": lambda e: layout(e)["follows"].append(["next", "x"]),
    "shorter layout": lambda e: layout(e)["record"].update(kind="AAAA"),
    "layout of text": lambda e: layout(e)["record"].update(low="_"),
    "groups that are none": lambda e: e[0]["environment"].update(groups=[]),
    "space of another kind": lambda e: e[0]["environment"]["groups"]["prey"].update(
        observation={"kind": "Sphere"}
    ),
    "space that is impossible": lambda e: e[0]["environment"]["groups"]["prey"].update(
        action={"kind": "Discrete", "n": -4, "start": 0}
    ),
    "no runs": lambda e: drop(e, "run"),
    "no header": lambda e: e.pop(0),
    "header twice": lambda e: e.append(e[0]),
    "two entries in a line": lambda e: e[-1].update(e[1]),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_inconsistent_journal_is_named(copy: Path, case: str) -> None:
    edit(copy, WRONG[case])
    read_refuses(copy, str(copy))


def test_inconsistent_episodes_are_named(copy: Path) -> None:
    index = Index.load(Folder(copy))
    entry = index.batches[1]
    assert entry.episodes > 1
    original = notes(copy, 1)
    size = entry.episodes * EpisodeTable.entry_size(index.rewards)
    columns = ("environment", "frame", "length")

    def read() -> EpisodeTable:
        return EpisodeTable.from_bytes(original[:size], entry.episodes, index.rewards)

    for column, value in (
        ("environment", 2),
        ("environment", 2**32 - 1),
        ("frame", 10),
        ("length", 0),
        ("length", -1),
        ("length", 2**50),
    ):
        table = read()
        getattr(table, column)[0] = value
        forge_notes(copy, 1, table.to_bytes() + original[size:])
        read_refuses(copy, str(copy))
    table = read()
    for column in columns:  # The same end twice.
        getattr(table, column)[1] = getattr(table, column)[0]
    forge_notes(copy, 1, table.to_bytes() + original[size:])
    read_refuses(copy, str(copy), "that cannot be there")
    table = read()
    table.frame[table.frame.argmax()] -= 1
    forge_notes(copy, 1, table.to_bytes() + original[size:])
    with pytest.raises(DatasetError, match="where .*'done'.* is False"):
        open_dataset(copy).verify()
    forge_notes(copy, 1, original)
    open_dataset(copy).verify()


def test_an_episode_longer_than_its_run_is_named(tmp_path: Path) -> None:
    """Also in the only run, where the batch before the first one is the last one."""
    path = tmp_path / "d"
    collector = Collector([CountingEnv] * 2, frames_per_batch=40, total_frames=80)
    with Writer(path, DatasetDescription("c", collector.description)) as writer:
        for batch in collector:
            writer.add(batch)
    index = Index.load(Folder(path))
    original, n_episodes = notes(path, 0), index.batches[0].episodes
    size = n_episodes * EpisodeTable.entry_size(index.rewards)
    table = EpisodeTable.from_bytes(original[:size], n_episodes, index.rewards)
    table.length[table.frame.argmin()] += 3
    forge_notes(path, 0, table.to_bytes() + original[size:])
    read_refuses(path, str(path), "whose first 3 frames are not there")


def test_valid_frames_must_be_the_first_ones_and_match_the_journal(
    tmp_path: Path,
) -> None:
    collector = MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=[10, 7], total_frames=34, seed=0
    )
    with (
        collector,
        Writer(
            tmp_path / "d", DatasetDescription("c", collector.description)
        ) as writer,
    ):
        for batch in collector:
            writer.add(batch)
    index = Index.load(Folder(tmp_path / "d"))
    layout = index.batches[1].layout
    path, parts = extent(tmp_path / "d", 1)
    stored = np.frombuffer(path.read_bytes()[parts.offset : parts.tails_at], np.uint8)
    records = Column(layout.record, 0, layout.record_size).read(stored.reshape(20, -1))
    (mask,) = range(*layout.records[VALID])
    assert sorted(records[:, mask]) == [0] * 3 + [1] * 17
    for damaged in (records[::-1, mask].copy(), 1, 0, np.roll(records[:, mask], 3)):
        records[:, mask] = damaged
        forge(tmp_path / "d", 1, parts.offset, layout.record.encode(records).tobytes())
        with pytest.raises(DatasetError, match="batch 1 .* does not mark the first"):
            _ = open_dataset(tmp_path / "d").transitions


def test_a_dataset_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(Path(__file__).parent / "data" / "dataset_v1.zip") as file:
        file.extractall(tmp_path / "d")
    read_refuses(tmp_path / "d", str(tmp_path / "d"), "of format version 1 or 2")
    with pytest.raises(FileExistsError, match="is not a dataset"):
        Writer(tmp_path / "d", _description())


def test_reading_continues_after_chdir(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    dataset = open_dataset("d")
    monkeypatch.chdir("/")
    assert len(read_all(dataset)[0]) == 6


APPENDS = """
import sys
from marl_collect import Collector
from marl_collect.storage import DatasetDescription, Writer
from workloads.counting import CountingEnv

collector = Collector([CountingEnv] * 2, frames_per_batch=20, total_frames=400)
with Writer(sys.argv[1], DatasetDescription("c", collector.description)) as writer:
    for batch in collector:
        writer.add(batch)
        print(len(writer.contents.batches), flush=True)
"""


def test_a_dataset_is_read_while_another_process_appends(copy: Path) -> None:
    with start_python("-c", APPENDS, copy) as program:
        assert program.stdout is not None
        for line in program.stdout:
            dataset = open_dataset(copy)
            assert len(dataset) >= int(line)
            assert len(dataset.transitions[:]) == dataset.contents.totals.frames
            assert len(dataset.trajectories) == dataset.contents.totals.episodes
    assert program.returncode == 0
    assert len(open_dataset(copy)) == 26


@pytest.mark.parametrize("size", [0, 4096, -1])
def test_truncation_of_a_mapped_file_is_an_error_and_no_signal(
    copy: Path, size: int
) -> None:
    dataset = open_dataset(copy)
    dataset.transitions[:]
    os.truncate(copy / DATA, (copy / DATA).stat().st_size - 1 if size < 0 else size)
    for read in (
        lambda: dataset[5],
        lambda: dataset.transitions[110:],
        lambda: list(dataset.episodes(5)),
        lambda: dataset.verify(5),
    ):
        with pytest.raises(DatasetError, match=f"{DATA} has .* bytes, but the journal"):
            read()


def test_damage_after_opening_is_found(copy: Path) -> None:
    dataset = open_dataset(copy)
    assert dataset[1]["next", "hunter", "reward"].any()
    frames = dataset.transitions[:]
    content = (copy / DATA).read_bytes()
    damaged = content[:90] + bytes(9) + content[99:]
    for step in ("in place", "replaced"):
        if step == "replaced":
            (copy / "new").write_bytes(damaged)
            (copy / "new").rename(copy / DATA)
        else:
            with (copy / DATA).open("r+b") as file:
                file.write(damaged)
        for read in (
            lambda: dataset[0],
            lambda: dataset.transitions[:],
            lambda: dataset.trajectories.select("hunter")[0],
            dataset.verify,
        ):
            with pytest.raises(DatasetError, match=f"{DATA} is damaged"):
                read()
        (copy / DATA).write_bytes(content)
        assert same(dataset.transitions[:], frames)


def test_damage_is_found_after_another_batch_was_verified(copy: Path) -> None:
    path, parts = extent(copy, 1)
    os.utime(path, (1, 1))  # Files that changed just now are always read again.
    dataset = open_dataset(copy)
    read_all(dataset)
    flip(path, parts.offset)
    os.utime(path, (2, 2))
    dataset.verify(0)  # Sees that the file has changed, but reads one batch only.
    with pytest.raises(DatasetError, match="checksum of batch 1"):
        dataset[1]
