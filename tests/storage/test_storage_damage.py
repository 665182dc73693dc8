"""Reading a damaged dataset raises an error that names the file and changes nothing."""

import hashlib
import json
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
from support.scripts import start_python

from marl_collect import Collector, MultiSyncCollector, open_dataset
from marl_collect.storage import DatasetDescription, DatasetError, Writer
from marl_collect.testing.counting import CountingEnv

REWARD = "batch-000001/next/hunter/reward.memmap"


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
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def read_refuses(folder: Path, named: str, message: str | None = None) -> None:
    """Every read that needs the file raises an error, and no file changes."""
    before = digests(folder.parent)
    with pytest.raises(DatasetError, match=message) as caught:
        read_all(open_dataset(folder))
    assert named in str(caught.value)
    assert digests(folder.parent) == before


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file, and correct the checksums so that its content is checked."""
    data = json.loads(path.read_text())
    change(data)
    if path.name == "index.json":
        data["checksum"] = None
    path.write_text(json.dumps(data))
    if path.name == "episodes.json":

        def correct(index: Any) -> None:
            entry = next(e for e in index["batches"] if e["name"] == path.parent.name)
            entry["checksums"][path.name] = zlib.crc32(path.read_bytes())

        edit(path.parent.parent / "index.json", correct)


def accept(path: Path) -> None:
    """Correct the checksum of a changed tensor file, so that its content is checked."""
    batch = next(p for p in path.parents if p.name.startswith("batch-"))
    key = list(path.relative_to(batch).with_suffix("").parts)
    files = json.loads((batch / "files.json").read_text())
    next(f for f in files if f["key"] == key)["checksum"] = zlib.crc32(
        path.read_bytes()
    )
    (batch / "files.json").write_text(json.dumps(files))

    def correct(index: Any) -> None:
        entry = next(e for e in index["batches"] if e["name"] == batch.name)
        entry["checksums"]["files.json"] = zlib.crc32(
            (batch / "files.json").read_bytes()
        )

    edit(batch.parent / "index.json", correct)


@pytest.mark.parametrize("size", [0, 1, 39, 41, 4096])
def test_a_tensor_file_of_the_wrong_size_is_named_and_not_changed(
    copy: Path, size: int
) -> None:
    os.truncate(copy / REWARD, size)
    read_refuses(copy, REWARD, f"has {size:,} bytes, but the index says")
    dataset = open_dataset(copy)
    for read in (lambda: dataset[1], lambda: dataset.transitions[:]):
        with pytest.raises(DatasetError, match="reward.memmap has"):
            read()
    assert dataset[0].shape == (2, 10)  # Other batches can be read.


def test_damage_in_files_that_are_not_read_has_no_effect(copy: Path) -> None:
    os.truncate(copy / REWARD, 3)
    dataset = open_dataset(copy)
    assert len(dataset.transitions.select(("hunter", "observation"))[:]) == 120
    assert (copy / REWARD).stat().st_size == 3


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / REWARD).unlink()
    read_refuses(copy, REWARD, "is missing")
    shutil.rmtree(copy / "batch-000001" / "next")
    read_refuses(copy, "batch-000001/next", "is missing")
    shutil.rmtree(copy / "batch-000001")
    read_refuses(copy, "batch-000001", "is missing")


@pytest.mark.parametrize(
    "place", [REWARD, "batch-000001/next", "batch-000001", "index.json"]
)
def test_links_are_not_followed(copy: Path, tmp_path: Path, place: str) -> None:
    (copy / place).rename(tmp_path / "elsewhere")
    (copy / place).symlink_to(tmp_path / "elsewhere")
    read_refuses(copy, place, "is a symbolic link")


def test_a_pipe_in_place_of_a_file_does_not_block(copy: Path) -> None:
    (copy / REWARD).unlink()
    os.mkfifo(copy / REWARD)
    read_refuses(copy, REWARD, "is not a regular file")


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


@pytest.mark.parametrize("name", ["index.json", "batch-000001/episodes.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]x", b"\xff\xfe\x00", b"null", b"7", b"[" * 100_000]
)
def test_invalid_json_is_named(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    read_refuses(copy, name)


def test_a_broken_meta_json_does_not_affect_our_reader(
    copy: Path, intact: Path
) -> None:
    for path in copy.rglob("meta.json"):
        path.write_bytes(b"\xff")
    assert same(read_all(open_dataset(copy)), read_all(open_dataset(intact)))


WRONG: dict[str, Callable[[Any], Any]] = {
    "absolute key": lambda d: d["keys"][0].update(key=["/etc/passwd"]),
    "key that climbs": lambda d: d["keys"][0].update(key=["..", "x"]),
    "key that climbs inside": lambda d: d["keys"][0].update(key=["a/../../x"]),
    "empty key": lambda d: d["keys"][0].update(key=[]),
    "empty part": lambda d: d["keys"][0].update(key=[""]),
    "key of numbers": lambda d: d["keys"][0].update(key=[1]),
    "key that is text": lambda d: d["keys"][0].update(key="done"),
    "key twice": lambda d: d["keys"].append(d["keys"][0]),
    "key below a key": lambda d: d["keys"].append(
        d["keys"][0] | {"key": [*d["keys"][0]["key"], "x"]}
    ),
    "missing key": lambda d: d["keys"].pop(),
    "module as dtype": lambda d: d["keys"][0].update(dtype="hub"),
    "unknown dtype": lambda d: d["keys"][0].update(dtype="float31"),
    "number as dtype": lambda d: d["keys"][0].update(dtype=3),
    "other dtype": lambda d: d["keys"][0].update(dtype="int8"),
    "negative shape": lambda d: d["keys"][0].update(shape=[-1, -1]),
    "huge shape": lambda d: d["keys"][0].update(shape=[10**30]),
    "other shape": lambda d: d["keys"][0].update(shape=[2]),
    "batch twice": lambda d: d["batches"].append(d["batches"][-1]),
    "batches out of order": lambda d: d["batches"].reverse(),
    "batch removed": lambda d: d["batches"].pop(1),
    "batch elsewhere": lambda d: d["batches"][0].update(name="../d"),
    "batch that does not exist": lambda d: d["batches"][-1].update(name="batch-000077"),
    "wrong frames": lambda d: d["batches"][0].update(frames=7),
    "too many frames": lambda d: d["batches"][0].update(frames=21),
    "frames as text": lambda d: d["batches"][0].update(frames="20"),
    "frames as bool": lambda d: d["batches"][0].update(frames=True),
    "wrong batch shape": lambda d: d["batches"][0].update(shape=[1, 10]),
    "turned batch shape": lambda d: d["batches"][0].update(shape=[2, 10, 1]),
    "wrong run": lambda d: d["batches"][0].update(run=5),
    "wrong episodes": lambda d: d["batches"][0].update(episodes=0),
    "wrong totals": lambda d: d["totals"].update(frames=1),
    "wrong sums": lambda d: d["totals"]["return_sums"].update(hunter=[1.0, 2.0]),
    "wrong lengths": lambda d: d["totals"].update(episode_frames=1),
    "groups that are none": lambda d: d["environment"].update(groups=[]),
    "space of another kind": lambda d: d["environment"]["groups"]["prey"].update(
        observation={"kind": "Sphere"}
    ),
    "space that is impossible": lambda d: d["environment"]["groups"]["prey"].update(
        action={"kind": "Discrete", "n": -4, "start": 0}
    ),
    "no runs": lambda d: d.pop("runs"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_inconsistent_index_is_named(copy: Path, what: str) -> None:
    edit(copy / "index.json", WRONG[what])
    read_refuses(copy, str(copy))


def test_inconsistent_episodes_are_named(copy: Path) -> None:
    name = "batch-000001/episodes.json"
    original = (copy / name).read_text()
    for change in (
        lambda d: d.pop(),
        lambda d: d.append(d[0]),
        lambda d: d[0].update(environment=1 - d[0]["environment"]),
        lambda d: d[0].update(environment=2),
        lambda d: d[0].update(frame=d[0]["frame"] - 1),
        lambda d: d[0].update(frame=-1),
        lambda d: d[0].update(length=0),
        lambda d: d[0].update(length=None),
        lambda d: d[0].update(returns=[]),
        lambda d: d[0].update(returns={"prey": ["a"]}),
        lambda d: d[0].update(terminated="yes"),
        lambda d: d[0]["returns"]["prey"].append(1.0),
    ):
        edit(copy / name, change)
        read_refuses(copy, name)
        (copy / name).write_text(original)
    edit(copy / name, lambda d: d[0].update(length=d[0]["length"] - 1))
    read_refuses(copy, str(copy))


def test_a_key_outside_the_dataset_is_not_read(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.memmap"
    shutil.copy(copy / "batch-000000" / "done.memmap", secret)

    def change(data: Any) -> None:
        field = next(f for f in data["keys"] if f["key"] == ["done"])
        field["key"] = [str(tmp_path / "secret")]

    edit(copy / "index.json", change)
    read_refuses(copy, "index.json", "is not a key")


def test_valid_frames_must_be_the_first_ones_and_match_the_index(
    tmp_path: Path,
) -> None:
    collector = MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=[10, 7], total_frames=34, seed=0
    )
    with (
        collector,
        Writer(tmp_path / "d", DatasetDescription("c", collector.description)) as w,
    ):
        for batch in collector:
            w.add(batch)
    mask = tmp_path / "d" / "batch-000001" / "collector" / "mask.memmap"
    content = mask.read_bytes()
    assert sorted(content) == [0] * 3 + [1] * 17
    for damaged in (
        content[::-1],
        b"\1" * 20,
        b"\0" * 20,
        content.replace(b"\1", b"\2"),
    ):
        mask.write_bytes(damaged)
        accept(mask)
        with pytest.raises(DatasetError, match=r"mask\.memmap does not mark"):
            _ = open_dataset(tmp_path / "d").transitions


def test_an_episode_that_crosses_an_unlisted_batch_is_an_error(copy: Path) -> None:
    def change(data: Any) -> None:
        entry = data["batches"].pop(1)
        for name in ("frames", "nbytes", "episodes"):
            data["totals"][name] -= entry[name]

    edit(copy / "index.json", change)
    read_refuses(copy, str(copy))
    dataset = open_dataset(copy)
    assert len(dataset.transitions) == 100
    with pytest.raises(DatasetError, match="is not listed in the index"):
        _ = dataset.trajectories


def test_a_dataset_of_an_earlier_version_opens_and_can_be_appended_to(
    tmp_path: Path,
) -> None:
    with zipfile.ZipFile(Path(__file__).parent / "data" / "dataset_v1.zip") as file:
        file.extractall(tmp_path / "d")
    dataset = open_dataset(tmp_path / "d")
    assert dataset.contents.totals.frames == len(dataset.transitions) == 64
    assert len(dataset.trajectories) == dataset.contents.totals.episodes == 5
    for number, batch in enumerate(dataset):
        folder = tmp_path / "d" / f"batch-00000{number}"
        for key, tensor in batch.flatten_keys("/").items():
            raw = np.fromfile(folder / f"{key}.memmap", np.uint8)
            assert tensor.numpy().tobytes() == raw.tobytes()
    with Writer(tmp_path / "d", dataset.contents.description) as writer:
        writer.add(dataset[0].clone())
    again = open_dataset(tmp_path / "d")
    assert len(again) == 5
    assert same(again[4], dataset[0])


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
from marl_collect.testing.counting import CountingEnv

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


def test_damage_after_opening_is_found(copy: Path) -> None:
    dataset = open_dataset(copy)
    assert dataset[1]["next", "hunter", "reward"].any()
    frames = dataset.transitions[:]
    file = copy / REWARD
    file.write_bytes(bytes(file.stat().st_size))
    for read in (lambda: dataset[1], dataset.verify, lambda: dataset.verify(1)):
        with pytest.raises(DatasetError, match="reward.memmap is damaged"):
            read()
    # It is not read again while it is mapped, unless it is asked for.
    assert not (dataset.transitions[:] == frames).all()
    with pytest.raises(DatasetError, match="reward.memmap is damaged"):
        open_dataset(copy).transitions[:]
