"""Datasets in object stores: a memory file system, and a local S3 server."""

import asyncio
import json
import os
import pickle
import shutil
import signal
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from storage_fuzz import batches, read_all, same, write
from storage_journal import extent, flip
from support.scripts import run_python
from typer.testing import CliRunner
from workloads.counting import CountingEnv

from marl_collect import open_dataset, record
from marl_collect.cli.main import app
from marl_collect.storage import (
    Dataset,
    DatasetError,
    Writer,
    appending,
    concatenate,
    copy,
    copying,
    remote,
    save,
)
from marl_collect.storage.index import JOURNAL
from marl_collect.storage.remote import RemoteFolder


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """The options of a local S3 server."""
    pytest.importorskip("s3fs", reason="needs the extra cloud")
    moto = pytest.importorskip("moto.server", reason="needs the extra dev")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    running.stop()


@pytest.fixture(params=["memory", "s3"])
def location(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A URL at which nothing is, and the options of its file system."""
    name = uuid.uuid4().hex
    if request.param == "memory":
        return f"memory://store/{name}", {}
    return f"s3://bucket/{name}", request.getfixturevalue("server")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("local") / "d"
    write(path)
    return path


FILES = {"journal.jsonl", "data-000000", "data-000000.blocks"}


def append(path: Path, seed: int) -> None:
    description, (batch,) = batches(1, seed)
    with Writer(path, description) as writer:
        writer.add(batch)


def test_a_copied_dataset_reads_like_the_original(
    location: tuple[str, dict[str, Any]], local: Path, tmp_path: Path
) -> None:
    url, options = location
    assert copy(local, url, storage_options=options) == 4
    dataset = open_dataset(url, storage_options=options)
    expected = open_dataset(local)
    assert same(read_all(dataset), read_all(expected))
    assert dataset.card() == expected.card()
    assert dataset.name == url
    with pytest.raises(ValueError, match="not on this machine"):
        _ = dataset.path
    assert copy(url, tmp_path / "back", storage_options=options) == 4
    for name in ("journal.jsonl", "data-000000"):
        assert (tmp_path / "back" / name).read_bytes() == (local / name).read_bytes()
    view = concatenate([dataset, local])
    assert len(view.transitions) == 2 * len(expected.transitions)


def test_only_what_is_read_is_fetched_and_it_is_removed(
    location: tuple[str, dict[str, Any]],
    local: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = location
    monkeypatch.setattr(remote, "_BLOCK", 512)
    copy(local, url, storage_options=options)
    dataset = open_dataset(url, storage_options=options)
    folder = dataset.parts[0][0]
    assert isinstance(folder, RemoteFolder)
    key = ("hunter", "observation")
    selection = dataset.transitions.select(key)[:10]
    assert same(selection, open_dataset(local).transitions.select(key)[:10])
    assert {p.name for p in folder.path.rglob("*") if p.is_file()} <= FILES
    (blocks,) = folder.blocks.values()
    _, parts = extent(local, 0)
    head = blocks[: -(-parts.packed_at // 512)]
    assert all(head)
    assert not any(blocks[len(head) :])  # No image, and no other batch.
    image = dataset.transitions.select(("hunter", "image"))[[3]]
    assert same(image, open_dataset(local).transitions.select(("hunter", "image"))[[3]])
    assert len(head) < sum(blocks) < len(head) + 20
    path = folder.path
    del dataset, folder
    assert not path.exists()


@pytest.mark.forks
def test_processes_that_load_share_the_fetched_files(
    location: tuple[str, dict[str, Any]], local: Path
) -> None:
    url, options = location
    copy(local, url, storage_options=options)
    dataset = open_dataset(url, storage_options=options)
    loader = dataset.loader(batch_size=8, seed=0, workers=2)
    frames = open_dataset(local).loader(batch_size=8, seed=0)
    for batch, expected in zip(loader, frames, strict=True):
        assert same(batch, expected)
    folder = dataset.parts[0][0].path
    assert folder.exists()  # A worker that ends removes nothing.
    unpickled = pickle.loads(pickle.dumps(dataset.transitions))
    assert same(unpickled[:], open_dataset(local).transitions[:])
    del unpickled
    assert folder.exists()


def test_a_dataset_that_grows_is_copied_again(
    location: tuple[str, dict[str, Any]], local: Path, tmp_path: Path
) -> None:
    url, options = location
    source = shutil.copytree(local, tmp_path / "d")
    assert copy(source, url, storage_options=options) == 4
    reader = open_dataset(url, storage_options=options)
    append(source, 5)
    assert copy(source, url, storage_options=options) == 1
    assert copy(source, url, storage_options=options) == 0
    assert len(open_dataset(url, storage_options=options)) == 5
    assert len(reader) == 4  # As of opening, and still complete.
    assert same(read_all(reader), read_all(open_dataset(local)))
    description, (batch,) = batches(1, 6)
    with Writer(source, description) as writer:
        writer.add(batch)
        assert copy(source, url, storage_options=options) == 1  # While it is written.


def test_another_dataset_is_not_replaced(
    location: tuple[str, dict[str, Any]], local: Path, tmp_path: Path
) -> None:
    url, options = location
    copy(local, url, storage_options=options)
    append(tmp_path / "other", 9)
    with pytest.raises(ValueError, match="holds another dataset") as error:
        copy(tmp_path / "other", url, storage_options=options)
    assert url in str(error.value)
    dataset = open_dataset(url, storage_options=options)
    assert same(read_all(dataset), read_all(open_dataset(local)))


def test_a_failed_copy_leaves_a_complete_prefix(
    location: tuple[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = location
    local = tmp_path / "d"
    segments(local, monkeypatch)
    upload, calls = RemoteFolder.upload, [0]

    def failing(self: Any, files: Any) -> None:
        calls[0] += 1
        if calls[0] == fails:
            raise ConnectionError("gone")
        upload(self, files)

    monkeypatch.setattr(RemoteFolder, "upload", failing)
    monkeypatch.setattr(copying, "_AT_ONCE", 1)
    expected = open_dataset(local)
    lengths = []
    # The journal, then for each batch a data file and the journal.
    for fails in (1, 5, 8) if options else range(1, 10):
        calls[0] = 0
        with pytest.raises(ConnectionError):
            copy(local, f"{url}/{fails}", storage_options=options)
        try:
            actual = open_dataset(f"{url}/{fails}", storage_options=options)
        except FileNotFoundError:
            assert fails == 1
            continue
        lengths.append(len(actual))
        assert same(actual[:], expected[: len(actual)])
        assert actual.contents.totals.episodes == len(list(actual.episodes()))
    assert lengths == ([1, 3] if options else [0, 0, 1, 1, 2, 2, 3, 3])
    calls[0] = -(10**6)
    assert copy(local, f"{url}/{fails}", storage_options=options) == 1  # It goes on.
    complete = open_dataset(f"{url}/{fails}", storage_options=options)
    assert same(read_all(complete), read_all(expected))


def segments(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a dataset with a data file for each of its four batches."""
    with monkeypatch.context() as patch:
        patch.setattr(appending, "SEGMENT", 1)
        write(path)
    assert len(list(path.glob("data-*"))) == 4


KILLED = """
import json, os, signal, sys
from marl_collect.storage import copy, copying, remote

copying._AT_ONCE = 1
source, url, options, count = sys.argv[1:]
upload, calls = remote.RemoteFolder.upload, [0]

def call(*arguments):
    calls[0] += 1
    if calls[0] == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return upload(*arguments)

remote.RemoteFolder.upload = call
copy(source, url, storage_options=json.loads(options))
"""


def test_a_killed_copy_to_a_server_goes_on(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, local = f"s3://bucket/{uuid.uuid4().hex}", tmp_path / "d"
    segments(local, monkeypatch)
    expected = open_dataset(local)
    for count, n_copied in ((5, 1), (3, 2), (2, 2)):
        process = run_python("-c", KILLED, local, url, json.dumps(server), str(count))
        assert process.returncode == -signal.SIGKILL
        actual = open_dataset(url, storage_options=server)
        assert len(actual) == n_copied
        assert same(actual[:], expected[:n_copied])
    assert copy(local, url, storage_options=server) == 2
    assert same(read_all(open_dataset(url, storage_options=server)), read_all(expected))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_a_killed_copy_to_a_folder_goes_on(
    local: Path, tmp_path: Path, count: int
) -> None:
    target = tmp_path / "copy"
    program = KILLED.replace("remote.RemoteFolder.upload", "os.write")
    program = program.replace(
        "calls[0] += 1", "copying._SYNCED = 1\n    calls[0] += 1"
    ).replace("import copy, copying, remote", "import copy, copying")
    process = run_python("-c", program, local, target, "null", str(count))
    assert process.returncode == -signal.SIGKILL
    n_copied = max(0, (count - 2) // 2)  # The journal, then two files for each batch.
    if count > 1:
        assert len(open_dataset(target)) == n_copied
        open_dataset(target).verify()
    assert copy(local, target) == 4 - n_copied
    assert same(read_all(open_dataset(target)), read_all(open_dataset(local)))


def test_a_copy_to_a_folder_syncs_the_name_of_a_new_file_before_it_lists_batches(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, bytes] = {}
    sync = os.fsync

    def record_names(descriptor: int) -> None:
        sync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            journal = (tmp_path / "copy" / JOURNAL).read_bytes()
            for name in os.listdir(descriptor):
                synced.setdefault(name, journal)

    monkeypatch.setattr(os, "fsync", record_names)
    assert copy(local, tmp_path / "copy") == 4
    assert b'{"batch"' not in synced["data-000000"]


def test_a_copy_refuses_what_is_in_its_place(local: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert copy(local, target) == 4
    append(target, 3)
    with pytest.raises(ValueError, match="or one with more batches"):
        copy(local, target)
    with (
        Writer(target, open_dataset(local).contents.description),
        pytest.raises(BlockingIOError, match="is being written to"),
    ):
        copy(local, target)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(FileExistsError, match="holds 'x'"):
        copy(local, tmp_path / "other")


def test_many_segments_are_copied_everywhere(
    location: tuple[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = location
    source = tmp_path / "d"
    segments(source, monkeypatch)
    assert copy(source, url, storage_options=options) == 4
    monkeypatch.setattr(appending, "SEGMENT", 1)
    append(source, 5)
    assert copy(source, url, storage_options=options) == 1
    dataset = open_dataset(url, storage_options=options)
    expected = read_all(open_dataset(source))
    assert same(read_all(dataset), expected)
    assert copy(url, tmp_path / "back", storage_options=options) == 5
    assert same(read_all(open_dataset(tmp_path / "back")), expected)
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names


@pytest.fixture
def requests_at_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many requests of each kind s3fs has made at the same time, at most."""
    s3fs = pytest.importorskip("s3fs", reason="needs the extra cloud")
    running: dict[str, int] = {}
    most: dict[str, int] = {}

    def counted(name: str) -> Any:
        request = getattr(s3fs.S3FileSystem, name)

        async def run(*arguments: Any, **options: Any) -> Any:
            running[name] = running.get(name, 0) + 1
            most[name] = max(most.get(name, 0), running[name])
            await asyncio.sleep(0.05)  # The others of one call begin.
            try:
                return await request(*arguments, **options)
            finally:
                running[name] -= 1

        return run

    for name in ("_put_file", "_cat_file"):
        monkeypatch.setattr(s3fs.S3FileSystem, name, counted(name))
    return most


def test_requests_of_a_copy_are_made_at_the_same_time(
    server: Any,
    requests_at_once: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, url = tmp_path / "d", f"s3://bucket/{uuid.uuid4().hex}"
    segments(source, monkeypatch)
    assert copy(source, url, storage_options=server) == 4
    assert requests_at_once["_put_file"] == 4
    monkeypatch.setattr(remote, "_PIECE", remote._BLOCK)
    monkeypatch.setattr(remote, "_AT_ONCE", 3)
    assert copy(url, tmp_path / "back", storage_options=server) == 4
    assert requests_at_once["_cat_file"] == 3
    for path in source.glob("[dj]*"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_images_of_many_batches_are_fetched_at_the_same_time(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://store/{uuid.uuid4().hex}"
    copy(local, url)
    monkeypatch.setattr(remote, "_BLOCK", 512)
    frames = open_dataset(url).transitions
    _ = frames.select("done")[:]  # Fetches all but images.
    calls = []
    fetch = MemoryFileSystem.cat_ranges

    def cat_ranges(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return fetch(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_ranges", cat_ranges)
    key = ("hunter", "image")
    images = frames.select(key)[:]
    assert len(calls) == 1
    assert same(images, open_dataset(local).transitions.select(key)[:])


def test_a_cache_keeps_what_was_read(
    location: tuple[str, dict[str, Any]], local: Path, tmp_path: Path
) -> None:
    url, options = location
    copy(local, url, storage_options=options)
    cache, expected = tmp_path / "cache", read_all(open_dataset(local))

    def opened() -> Dataset:
        return open_dataset(url, storage_options=options, cache=cache)

    first, second = opened(), opened()
    assert same(first[0], expected[0][0])
    assert same(read_all(second), expected)
    del first, second
    store, root = fsspec.url_to_fs(url, **options)
    store.rm_file(f"{root}/data-000000")
    assert same(read_all(opened()), expected)  # The journal is in the store.
    unpickled = pickle.loads(pickle.dumps(opened().transitions))
    assert same(unpickled[:], expected[1])
    with pytest.raises(DatasetError, match="data-000000 is missing"):
        read_all(open_dataset(url, storage_options=options))


@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["view", "--episode", "0", "--save", "page.html"],
    ],
)
def test_commands_keep_what_they_read_in_a_cache(
    command: list[str],
    location: tuple[str, dict[str, Any]],
    local: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = location
    copy(local, url, storage_options=options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", options.get("endpoint_url", ""))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    name, *arguments = command

    def run(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [name, url, *arguments, *more])
        return result.exit_code, result.output

    assert run("--cache", "kept")[0] == 0
    store, root = fsspec.url_to_fs(url, **options)
    store.rm_file(f"{root}/data-000000")
    code, output = run("--cache", "kept")
    assert code == 0, output
    code, output = run()
    assert code == 2
    assert "data-000000 is missing" in output
    result = CliRunner().invoke(app, [name, str(local), *arguments, "--cache", "kept"])
    assert result.exit_code == 2
    assert "a cache is for URLs only" in " ".join(result.output.split())


def test_a_cache_has_nothing_of_another_content(
    location: tuple[str, dict[str, Any]], local: Path, tmp_path: Path
) -> None:
    url, options = location
    cache, source = tmp_path / "cache", shutil.copytree(local, tmp_path / "d")

    def check() -> None:
        copy(source, url, storage_options=options)
        dataset = open_dataset(url, storage_options=options, cache=cache)
        assert same(read_all(dataset), read_all(open_dataset(source)))

    check()
    append(source, 5)
    check()
    store, root = fsspec.url_to_fs(url, **options)
    store.rm(root, recursive=True)
    shutil.rmtree(source)
    append(source, 6)
    check()


def test_damage_in_a_cache_is_an_error_that_names_it(
    local: Path, tmp_path: Path
) -> None:
    url = f"memory://store/{uuid.uuid4().hex}"
    copy(local, url)
    _ = open_dataset(url, cache=tmp_path)[:]
    (file,) = (path for path in tmp_path.iterdir() if path.suffix != ".blocks")
    flip(file, 3)
    with pytest.raises(DatasetError, match=f"cached in {file}: delete") as error:
        open_dataset(url, cache=tmp_path)[0]
    assert url in str(error.value)
    assert "is damaged" in str(error.value)
    file.unlink()
    comparisons = (
        open_dataset(url, cache=tmp_path)[0] == open_dataset(local)[0]
    ).items(True, True)
    assert not [key for key, equal in comparisons if not equal.all()]
    with pytest.raises(ValueError, match="a cache is for URLs only"):
        open_dataset(local, cache=tmp_path)


def test_damage_in_a_store_is_an_error(
    location: tuple[str, dict[str, Any]], local: Path
) -> None:
    url, options = location
    copy(local, url, storage_options=options)
    store, root = fsspec.url_to_fs(url, **options)
    name, journal = f"{root}/data-000000", f"{root}/journal.jsonl"

    def refused(match: str) -> None:
        with pytest.raises(DatasetError, match=match) as error:
            read_all(open_dataset(url, storage_options=options))
        assert url in str(error.value)

    original = store.cat_file(name)
    content = bytearray(original)
    content[3] ^= 1
    store.pipe_file(name, bytes(content))
    refused(f"{url}/data-000000 is damaged")
    store.pipe_file(name, original[:-9])
    refused("data-000000 ends before byte .* but the journal lists")
    store.rm_file(name)
    refused("data-000000 is missing")
    lines = store.cat_file(journal)
    store.pipe_file(journal, lines.replace(b'"run"', b'"ran"', 1))
    refused(r"journal\.jsonl: line \d is damaged")
    store.pipe_file(name, original)
    store.pipe_file(journal, lines[:-9])  # As if the last line was never complete.
    dataset = open_dataset(url, storage_options=options)
    assert same(dataset[:], open_dataset(local)[:3])


def test_damage_is_not_copied(local: Path, tmp_path: Path) -> None:
    source = shutil.copytree(local, tmp_path / "d")
    path, parts = extent(source, 2)
    flip(path, parts.packed_at - 1)
    url = f"memory://store/{uuid.uuid4().hex}"
    for target in (url, tmp_path / "copy"):
        with pytest.raises(DatasetError, match="is damaged"):
            copy(source, target)
        assert len(open_dataset(target)) == 0  # The journal is written at the end.


def test_writing_to_a_url_is_refused_with_advice(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    description, _ = batches(1)
    for path in ("s3://bucket/d", Path("s3://bucket/d")):
        with pytest.raises(
            ValueError, match="`marl-collect copy FOLDER s3://bucket/d`"
        ):
            Writer(path, description)
        with pytest.raises(ValueError, match="is a URL"):
            record(path, CountingEnv, frames=2)
        trajectories = open_dataset(local).trajectories
        with pytest.raises(ValueError, match="is a URL"):
            save(trajectories, path)
    assert os.listdir(tmp_path) == []


def test_wrong_urls_are_errors(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="none holds no dataset.*marl-collect view"
    ):
        open_dataset("memory://none")
    with pytest.raises(ValueError, match=r"[Pp]rotocol"):
        open_dataset("nosuch://none")
    for call in (open_dataset, lambda path, **o: copy(path, path, **o)):
        with pytest.raises(ValueError, match="storage_options are for URLs"):
            call(tmp_path, storage_options={"anon": True})


def test_copying_on_the_command_line(
    location: tuple[str, dict[str, Any]], local: Path
) -> None:
    from typer.testing import CliRunner

    from marl_collect.cli.main import app

    url, options = location
    arguments = [f"--option={name}={value}" for name, value in options.items()]
    result = CliRunner().invoke(app, ["copy", str(local), url, *arguments])
    assert result.exit_code == 0, result.output
    assert "4 batches" in result.output
    if not options:
        result = CliRunner().invoke(app, ["inspect", url])
        assert result.exit_code == 0, result.output
        assert url in result.output


@pytest.mark.parametrize(("size", "most"), [(8, 2), (10_000, 3)])
def test_one_frame_of_one_key_takes_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    description, data = batches(4, 0)
    with Writer(tmp_path / "d", description) as writer:
        for batch in data:
            batch["values"] = torch.rand(*batch.shape, size // 4)
            writer.add(batch)
    url = f"memory://store/{uuid.uuid4().hex}"
    copy(tmp_path / "d", url)
    requests = []
    fetch = MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        requests.append(path)
        return fetch(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(remote, "_BLOCK", 512)
    frame = open_dataset(url).transitions.select("values")[30]["values"]
    assert (frame == open_dataset(tmp_path / "d").transitions[30]["values"]).all()
    assert 2 <= len(requests) <= most


def test_a_request_that_failed_is_made_again(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://store/{uuid.uuid4().hex}"
    copy(local, url)
    dataset = open_dataset(url)
    with monkeypatch.context() as patch:

        def fail(*_arguments: Any, **_options: Any) -> Any:
            raise ConnectionError("the network is down")

        patch.setattr(MemoryFileSystem, "cat_ranges", fail)
        with pytest.raises(ConnectionError):
            dataset[0]
    assert same(dataset[0], open_dataset(local)[0])
