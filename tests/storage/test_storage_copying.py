"""Copies between folders, a memory file system and a local S3 server."""

import json
import os
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from storage_streams import ABOUT, Frame, Stream, frames_of, read, write
from support.stores import s3_server

from marl_collect.storage import DatasetDescription, DatasetError
from marl_collect.storage.copying import copy
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.writer import Writer

Location = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.fixture(params=["folder", "memory", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Where nothing is, and the options of its file system."""
    name = uuid.uuid4().hex
    MemoryFileSystem.clear_instance_cache()  # What was patched stays in an instance.
    if request.param == "s3":
        return f"s3://bucket/{name}", request.getfixturevalue("server")
    places = {"folder": str(tmp_path / name), "memory": f"memory://store/{name}"}
    return places[request.param], {}


@pytest.fixture
def store(location: Location) -> Location:
    """A URL."""
    return location


URLS = pytest.mark.parametrize("location", ["memory", "s3"], indirect=True)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def write_files(path: Path, seed: int, batches: int = 3) -> list[Frame]:
    """Write a run whose batches are files of their own; return its frames."""
    data = Stream(seed).batches(batches)
    with patch("marl_collect.storage.writer._SMALL_BYTES", 0):
        write(path, data)
    return frames_of(*data)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Two runs of three files each."""
    for seed in range(2):
        write_files(tmp_path / "d", seed)
    return tmp_path / "d"


def names(location: Location) -> list[str]:
    """Return the names of the files at a location, hidden ones too."""
    place, root = fsspec.url_to_fs(location[0], **location[1])
    place.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in place.ls(root, detail=False))


def opened(location: Location, **options: Any) -> Dataset:
    return open_dataset(location[0], **location[1], **options)


def transfers(store: Location, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each file is added that a store transfers."""
    place, _ = fsspec.url_to_fs(store[0], **store[1])
    # Without asyncio, each thread has an instance of its own.
    owner = place if place.async_impl else type(place)
    transferred: list[str] = []
    for name in ("get_file", "put_file"):

        def counted(source: str, *arguments: Any, method: Any, **options: Any) -> None:
            transferred.append(source.rpartition("/")[2])
            method(source, *arguments, **options)

        method = partial(counted, method=getattr(place, name))
        monkeypatch.setattr(owner, name, staticmethod(method))
    return transferred


def test_a_copy_reads_like_the_original(
    location: Location, local: Path, tmp_path: Path
) -> None:
    url, options = location
    (local / "README.md").write_text("card")
    assert copy(local, url, **options) == 7
    frames = read(local)
    dataset = opened(location)
    assert read(dataset) == frames
    assert dataset.name == url
    dataset.verify()
    assert copy(url, tmp_path / "back", **options) == 7
    for path in local.glob("[!.]*"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    other: Location = (f"memory://store/{uuid.uuid4().hex}", {})
    assert copy(url, other[0], **options) == 7
    assert read(opened(other)) == frames
    assert copy(local, f"{url}//within/", **options) == 7
    for name in ("within", "/within", "within//"):
        assert read(opened((f"{url}/{name}", options))) == frames


@URLS
def test_only_new_files_are_copied_and_fetched_once(
    store: Location, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = store
    transferred = transfers(store, monkeypatch)
    before = {path.name for path in local.glob("*.parquet")}
    assert copy(local, url, **options) == 6
    assert sorted(transferred) == sorted(before)
    with ThreadPoolExecutor(3) as pool:  # Readers at once.
        datasets = [*pool.map(opened, [store] * 3)]
    assert [len(dataset) for dataset in datasets] == [72] * 3
    assert sorted(transferred) == sorted([*before] * 2)
    assert copy(local, url, **options) == 0
    assert len(opened(store)) == 72
    write_files(local, 2, batches=1)
    (new,) = {path.name for path in local.glob("*.parquet")} - before
    assert copy(local, url, **options) == 1
    assert read(opened(store)) == read(local)
    assert transferred[12:] == [new, new]


@URLS
def test_files_that_a_writer_joins_replace_their_parts(
    store: Location, tmp_path: Path, caches: Path
) -> None:
    url, options = store
    batches = Stream(1).batches(3)
    frames = frames_of(*batches)
    with Writer(tmp_path / "d", ABOUT) as writer:
        for batch in batches:
            writer.add(batch)
        assert copy(tmp_path / "d", url, **options) == 3
        assert read(opened(store)) == frames
        (state,) = caches.rglob("state.json")
        generation = json.loads(state.read_text())["generation"]
    assert copy(tmp_path / "d", url, **options) == 1
    (name,) = names(store)
    assert name.endswith(".000000-000002.parquet")
    assert read(opened(store)) == frames
    assert json.loads(state.read_text())["generation"] == generation
    assert [path.name for path in caches.rglob("*.parquet")] == [name]
    # A folder, too.
    copy(url, tmp_path / "copy", **options)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == [name]


@pytest.mark.parametrize("method", ["open", "get_file"])
def test_a_file_that_vanishes_meanwhile_was_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    stream = Stream(1)
    batches = stream.batches(3)
    writer = Writer(tmp_path / "d", ABOUT)
    for batch in batches:
        writer.add(batch)
        copy(tmp_path / "d", tmp_path / "copy")
    writer.add(batch := stream.batch())
    kind = type(fsspec.filesystem("file"))
    read_file = getattr(kind, method)

    def join_first(place: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if Path(path).parent == tmp_path / "d":
            writer.close()
        return read_file(place, path, *arguments, **options)

    monkeypatch.setattr(kind, method, join_first)
    assert copy(tmp_path / "d", tmp_path / "copy") == 1
    assert read(tmp_path / "copy") == frames_of(*batches, batch)


@URLS
def test_a_cache_keeps_several_urls_without_what_was_deleted_there(
    store: Location, local: Path, tmp_path: Path, caches: Path
) -> None:
    url, options = store
    write_files(tmp_path / "other", 7)
    for source, name in ((local, "a"), (tmp_path / "other", "b")):
        copy(source, f"{url}/{name}", **options)
    kept: Any = {"cache": tmp_path / "kept"} | options
    for _ in range(2):
        first = open_dataset(f"{url}/a", **kept)
        both = open_dataset([f"{url}/a", f"{url}/b"], **kept)
    assert (len(first), len(both)) == (72, 108)
    assert not caches.exists()
    place, root = fsspec.url_to_fs(url, **options)
    for path in sorted(local.glob("*.parquet"))[:3]:
        place.rm_file(f"{root}/a/{path.name}")
        path.unlink()
    assert read(open_dataset(f"{url}/a", **kept)) == read(local)


@URLS
def test_a_copy_that_was_interrupted_is_a_dataset_and_goes_on(
    store: Location, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills of a copy to a folder are in ``test_storage_kills.py``."""
    url, options = store
    place, root = fsspec.url_to_fs(url, **options)  # The same instance for all.
    put_file, calls = place.put_file, iter(range(100))

    def put(*arguments: Any, **settings: Any) -> None:
        if next(calls) == 4:
            raise KeyboardInterrupt
        put_file(*arguments, **settings)

    monkeypatch.setattr(place, "put_file", put)
    with pytest.raises(KeyboardInterrupt):
        copy(local, url, **options)
    frames = read(local)
    assert read(opened(store)) == frames[:48]
    last = names(store)[-1]  # As a store without atomic writes may leave it.
    place.pipe_file(f"{root}/{last}", b"PAR1")
    assert copy(local, url, **options) == 3
    assert read(opened(store)) == frames


def test_a_target_of_another_kind_is_refused(
    location: Location, local: Path, tmp_path: Path
) -> None:
    url, options = location
    copy(local, url, **options)
    before = names(location)
    batch = Stream(3).batch()
    write(tmp_path / "a", [batch], DatasetDescription("other", ABOUT.environment))
    write(tmp_path / "b", [batch.exclude("frame")])
    for name, text in (
        ("a", "task is 'other', but 'stream' in the dataset"),
        ("b", r"\('frame',\) is missing, but int64"),
    ):
        with pytest.raises(ValueError, match=f"of another kind: {text}"):
            copy(tmp_path / name, url, **options)
    assert names(location) == before


def test_bad_places_are_errors_that_name_them(
    local: Path, tmp_path: Path, server: dict[str, Any]
) -> None:
    with pytest.raises(FileNotFoundError, match="none has no batches of a dataset"):
        copy(tmp_path / "none", tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match="memory://none has no batches"):
        open_dataset("memory://none")
    with pytest.raises(ValueError, match="options for URLs: endpoint_url"):
        copy(local, tmp_path / "copy", endpoint_url="x")
    with pytest.raises(ValueError, match="is no URL: endpoint_url are for URLs"):
        open_dataset(local, endpoint_url="x")
    with pytest.raises(OSError, match=r"nothing://x cannot be .*Protocol not known"):
        copy(local, "nothing://x")
    for url in ("file:///x", Path("file:///x"), "local://x"):
        with pytest.raises(ValueError, match="pass its path, without"):
            open_dataset(url)
    with pytest.raises(FileNotFoundError, match="memory://x has no batches"):
        open_dataset("memory:///x")
    for url in ("s3://", "s3:///"):
        with pytest.raises(ValueError, match="as s3://bucket/data does"):
            copy(local, url)
    with pytest.raises(OSError, match="bucket does not exist"):
        copy(local, "s3://none/x", **server)
    gone = server | {
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    with pytest.raises(OSError, match="s3://bucket/x cannot be read or written"):
        open_dataset("s3://bucket/x", **gone)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(FileExistsError, match="full holds no dataset, but notes"):
        copy(local, tmp_path / "full")
    sorted(local.glob("*.parquet"))[1].unlink()
    with pytest.raises(DatasetError, match="d lacks batch 1 of the run"):
        copy(local, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_missing_package_is_named(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    classes = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(classes, "s3", raising=False)
    for use in (
        lambda: copy(local, "s3://bucket/x"),
        lambda: open_dataset("s3://bucket/x"),
    ):
        with pytest.raises(ImportError, match=r"s3fs.*marl-collect\[cloud\]"):
            use()


@URLS
def test_a_file_that_changes_while_it_is_fetched_is_an_error(
    store: Location, local: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = store
    copy(local, url, **options)
    place, _ = fsspec.url_to_fs(url, **options)  # The same instance for all.
    get_file = place.get_file

    def cut(source: str, target: str, **settings: Any) -> None:
        get_file(source, target, **settings)
        os.truncate(target, 100)

    monkeypatch.setattr(place, "get_file", cut)
    with pytest.raises(OSError, match=r"parquet was changed while it was copied"):
        opened(store)
    assert not [path for path in caches.rglob("*") if "parquet" in path.name]


@pytest.mark.parametrize("path", ["s3://bucket/d", Path("s3://bucket/d")])
def test_urls_are_not_written_to(
    path: str | Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    episodes = open_dataset(local).trajectories
    before = os.listdir()
    for use in (lambda: Writer(path, ABOUT), lambda: episodes.save(path)):
        with pytest.raises(
            ValueError, match="`marl-collect copy FOLDER s3://bucket/d`"
        ):
            use()
    assert os.listdir() == before
