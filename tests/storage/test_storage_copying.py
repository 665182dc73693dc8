"""Copies between folders, a memory file system and a local S3 server."""

import os
import shutil
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
from storage_streams import ABOUT, Stream, read, write
from support.stores import s3_server

from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    DatasetError,
    Writer,
    copy,
    copying,
    open_dataset,
)

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


URLS = pytest.mark.parametrize("location", ["memory", "s3"], indirect=True)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def write_files(path: Path, seed: int) -> None:
    """Write a run of three files."""
    with patch("marl_collect.storage.writer._SMALL_BYTES", 0):
        write(path, Stream(seed).batches(3))


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
    paths = (path.rpartition("/")[2] for path in place.ls(root, detail=False))
    return sorted(name for name in paths if name != ".cache")


def opened(location: Location) -> Dataset:
    return open_dataset(location[0], **location[1])


def test_a_copy_reads_like_the_original(
    location: Location, local: Path, tmp_path: Path
) -> None:
    url, options = location
    (local / "README.md").write_text("card")
    assert [copy(local, url, **options) for _ in range(2)] == [7, 0]
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
def test_files_are_fetched_once_and_again_if_they_are_cut(
    location: Location, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = location
    transferred: list[str] = []
    transfer = copying._transfer

    def counted(origin: Any, goal: Any, name: str, *about: Any) -> None:
        transferred.append(name)
        transfer(origin, goal, name, *about)

    monkeypatch.setattr(copying, "_transfer", counted)
    before = {path.name for path in local.glob("*.parquet")}
    assert copy(local, url, **options) == 6
    assert sorted(transferred) == sorted(before)
    with ThreadPoolExecutor(3) as pool:  # Readers at once.
        datasets = [*pool.map(opened, [location] * 3)]
    assert [len(dataset) for dataset in datasets] == [72] * 3
    assert sorted(transferred) == sorted([*before] * 2)
    # As a store without atomic writes may leave it when a copy is interrupted.
    place, root = fsspec.url_to_fs(url, **options)
    place.pipe_file(f"{root}/{max(before)}", b"PAR1")
    assert copy(local, url, **options) == 1
    assert read(opened(location)) == read(local)


@URLS
def test_a_cache_keeps_several_urls_without_what_was_deleted_there(
    location: Location, local: Path, tmp_path: Path, caches: Path
) -> None:
    url, options = location
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
        ("b", r"\('frame',\) is 'missing', but 'int64"),
    ):
        with pytest.raises(ValueError, match=f"of another kind: {text}"):
            copy(tmp_path / name, url, **options)
    assert names(location) == before


GONE: dict[str, Any] = {
    "endpoint_url": "http://127.0.0.1:9",
    "config_kwargs": {"retries": {"max_attempts": 0}},
    "key": "k",
    "secret": "s",
}
copy_gone, open_gone = partial(copy, **GONE), partial(open_dataset, **GONE)
UPLOAD = "`marl-collect copy FOLDER s3://bucket/d`"


def save(path: Path) -> None:
    open_dataset("d").trajectories.save(path)


PLACES: Any = [
    (ValueError, UPLOAD, partial(Writer, description=ABOUT), "s3://bucket/d"),
    (ValueError, UPLOAD, save, Path("s3://bucket/d")),
    (FileNotFoundError, "none has no batches of a dataset", copy, "none", "copy"),
    (FileNotFoundError, "memory://none has no batches", open_dataset, "memory://none"),
    (FileNotFoundError, "memory://x has no batches", open_dataset, "memory:///x"),
    (DatasetError, "lacking lacks batch 1 of the run", copy, "lacking", "copy"),
    (ValueError, "options for URLs: endpoint_url", copy_gone, "d", "copy"),
    (ValueError, "is no URL: endpoint_url.* are for URLs", open_gone, "d"),
    (ValueError, "pass its path, without file", open_dataset, "file:///x"),
    (ValueError, "pass its path, without file", open_dataset, Path("file:///x")),
    (ValueError, "pass its path, without local", open_dataset, "local://x"),
    (ValueError, "as s3://bucket/data does", copy, "d", "s3://"),
    (ValueError, "as s3://bucket/data does", copy, "d", "s3:///"),
    (OSError, "nothing://x cannot be .*Protocol not known", copy, "d", "nothing://x"),
    (OSError, "s3://bucket/x cannot be read or written", open_gone, "s3://bucket/x"),
]


@pytest.mark.parametrize("row", PLACES)
def test_bad_places_are_errors_that_name_them(
    row: Any, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, message, use, *places = row
    monkeypatch.chdir(local.parent)
    lacking = Path(shutil.copytree(local, "lacking"))
    sorted(lacking.glob("*.parquet"))[1].unlink()
    before = {*os.listdir(), "caches"}
    with pytest.raises(error, match=message):
        use(*places)
    assert {*os.listdir(), "caches"} == before


def test_a_bucket_must_exist(local: Path, server: dict[str, Any]) -> None:
    with pytest.raises(OSError, match="bucket does not exist"):
        copy(local, "s3://none/x", **server)


def test_a_missing_package_is_named(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    classes = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(classes, "s3", raising=False)
    for use in (partial(copy, local), open_dataset):
        with pytest.raises(ImportError, match=r"s3fs.*marl-collect\[cloud\]"):
            use("s3://bucket/x")


@URLS
def test_a_file_that_changes_while_it_is_fetched_is_an_error(
    location: Location, local: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = location
    copy(local, url, **options)
    place, _ = fsspec.url_to_fs(url, **options)  # The same instance for all.
    get_file = place.get_file

    def cut(source: str, target: str, **settings: Any) -> None:
        get_file(source, target, **settings)
        os.truncate(target, 100)

    monkeypatch.setattr(place, "get_file", cut)
    with pytest.raises(OSError, match=r"parquet was changed while it was copied"):
        opened(location)
    assert not [path for path in caches.rglob("*") if "parquet" in path.name]
