"""What a dataset says about its frames, where its cache is, and copies of it.

Copies are between folders, a memory file system and a local S3 server.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from gymnasium import spaces
from storage_streams import (
    ABOUT,
    BrokenDiskError,
    Stream,
    add_run,
    failing,
    frames_of,
    read,
    write,
)
from support.scripts import run_python
from support.stores import s3_server

from marl_collect.core.seeding import episode_seed
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import (
    DatasetDescription,
    DatasetError,
    Writer,
    copy,
    copying,
    files,
    open_dataset,
)
from marl_collect.storage import dataset as opening
from marl_collect.storage.card import describe_space
from marl_collect.storage.statistics import Range


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A dataset of two runs."""
    for seed in range(2):
        add_run(tmp_path / "d", seed)
    return tmp_path / "d"


def test_the_card_shows_what_the_dataset_holds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marl_collect.storage.frames._PART", 250)  # Four parts.
    add_run(path, 2)
    dataset = open_dataset(path)
    card = dataset.card()
    assert card == open_dataset(path).card()
    assert card.startswith("# c\n")
    frames = flatten(dataset.transitions[:])
    ranges = {k: Range(v.min().item(), v.max().item()) for k, v in frames.items()}
    assert dataset.transitions.ranges() == ranges
    trajectories = dataset.trajectories
    sums = trajectories.returns
    numbers = {("all", "team sum"): sums, ("all", "length"): trajectories.lengths}
    for group, returns in trajectories.agent_returns.items():
        numbers |= {
            (group, f"{group}_{i}"): values for i, values in enumerate(returns.T)
        }
    rows = [
        (*names, *(f"{f(values):,.5g}" for f in (np.mean, np.std, np.min, np.max)))
        for names, values in numbers.items()
    ]
    for line in (
        "| `('hunter', 'image')` | [2, 40, 36, 3] | uint8 | 0 | 255 | 0 |",
        "900 frames",
        "| policy: kind=random<br>new versions: python=3.11 |",
        "| policy: kind=random |",
        "| policy: kind=random<br>new versions: python=3.12 |",
        "| `prey` | 3: prey_0, prey_1, prey_2 | Box [3]",
        *(f"| `{group}` | {' | '.join(row)} |" for group, *row in rows),
    ):
        assert line in card
    columns = {line.count("|") for line in card.splitlines() if line.startswith("| ")}
    assert columns == {5, 6, 7}
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace('"data"', repr(str(path))), {})
    assert "None." not in card


def test_every_space_has_a_short_text() -> None:
    for space, text in (
        (spaces.Box(-1, 2, (3,)), "Box [3] float32 in [-1, 2]"),
        (spaces.Dict(a=spaces.Box(0, 1, (2, 0), np.uint8)), "a: Box [2, 0] uint8"),
        (spaces.MultiDiscrete([2, 3]), "MultiDiscrete([2 3])"),
    ):
        assert describe_space(space) == text


def test_several_folders_are_read_as_one_and_saved(path: Path, tmp_path: Path) -> None:
    cache, more, other = (tmp_path / name for name in ("cache", "e", "other"))
    add_run(more, 2)
    both = open_dataset([more, path], cache=cache)
    assert both.name == f"{more}, {path}"
    parts = [open_dataset(folder).transitions[:] for folder in (more, path)]
    assert (both.transitions[:] == torch.cat(parts)).all()
    assert [run.seed for run in both.runs] == [2, 0, 1]
    episodes = both.trajectories
    ids = episodes.first(("collector", "traj_ids")).tolist()
    assert episodes.seeds == [
        episode_seed([2, 0, 1][run], number >> 32, number & 0xFFFFFFFF)
        for run, number in zip(episodes.run_numbers, ids, strict=True)
    ]
    few = episodes[::2].select("hunter", "next", ("collector", "traj_ids"))
    few.save(tmp_path / "few")  # The state machine saves, too, and in several files.
    saved = open_dataset(tmp_path / "few").trajectories
    assert saved.seeds == few.seeds
    assert (saved.transitions[:] == few.transitions[:]).all()
    add_run(other, 0, task="another")
    with pytest.raises(DatasetError, match="task is 'another', but 'c' in"):
        open_dataset([path, other], cache=cache)
    for twice in (path, shutil.copytree(path, tmp_path / "f")):
        with pytest.raises(ValueError, match="episodes would be read twice"):
            open_dataset([path, twice])
    with pytest.raises(ValueError, match="no folders"):
        open_dataset([])
    wrong: Any
    for wrong in (b"data", None, 3, [b"data"]):
        with pytest.raises(TypeError, match="path must be a string, a Path or a seq"):
            open_dataset(wrong)


def test_a_cache_that_cannot_be_written_is_elsewhere(
    local: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(local)
    shutil.rmtree(local / ".cache")
    monkeypatch.setattr(os, "access", lambda *_: False)  # As for a user.
    assert read(local) == expected
    assert not (local / ".cache").exists()
    assert len(list((caches / "marl_collect").iterdir())) == 1


@pytest.mark.parametrize("call", range(10))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENFILE])
def test_a_cache_that_cannot_be_built_says_why(
    local: Path, tmp_path: Path, call: int, number: int
) -> None:
    with failing(call, number), pytest.raises(BrokenDiskError) as error:
        open_dataset(local)
    advice = "pass cache=, a folder with free space"
    assert (advice in str(error.value)) == (number == errno.ENOSPC)
    assert read(open_dataset(local, cache=tmp_path / "cache")) == read(local)


def test_a_full_disk_without_an_error_number_is_named(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any) -> None:
        raise OSError("6696 requested and 4096 written")  # By NumPy, so without one.

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(OSError, match=r"\(6696 requested and 4096 w.*pass cache="):
        open_dataset(local)


def test_a_reader_that_waited_keeps_the_newer_cache(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, state = len(open_dataset(local)), local / ".cache" / "state.json"
    states: list[bytes] = []

    def older(folder: Path) -> list[files.BatchFile]:
        monkeypatch.undo()
        listed = files.list_files(folder)
        write_files(local, 2)  # Meanwhile another one writes, and a third one opens it.
        open_dataset(local)
        states.append(state.read_bytes())
        return listed

    monkeypatch.setattr(opening, "list_files", older)
    assert len(open_dataset(local)) == before + 36
    assert [state.read_bytes()] == states


@pytest.mark.parametrize("use", ["open", "copy", "copy what is new"])
@pytest.mark.parametrize("overlap", ["a new file is missing", "a part is listed"])
def test_a_listing_that_overlaps_a_join_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str, overlap: str
) -> None:
    path, target = tmp_path / "d", tmp_path / "copy"
    batches, arranged = Stream().batches(3), files.arranged
    writer = Writer(path, ABOUT)
    for batch in batches:
        writer.add(batch)
        if use == "copy what is new" and batch is batches[0]:
            copy(path, target)
    listings: list[list[Path]] = []

    def outdated(paths: Iterable[Path], *arguments: Any, **options: Any) -> Any:
        listed = sorted(paths)
        if not listings and listed[0].parent == path:
            listings.append(listed)
            if overlap == "a part is listed":
                writer.close()  # They are gone.
            else:
                listed = listed[1:]
        return arranged(listed, *arguments, **options)

    for module in (files, copying):
        monkeypatch.setattr(module, "arranged", outdated)
    assert read(path) if use == "open" else copy(path, target)
    writer.close()
    assert len(listings[0]) == 3
    assert read(path if use == "open" else target) == frames_of(*batches)


Location = tuple[str, dict[str, Any]]
STORAGE = "import marl_collect.storage as m; m.{}"
COMMAND = "sys.argv[1:] = {}; import marl_collect.cli.main as m; m.main()"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "extra", "use", "output"),
    [
        ("pyarrow", "datasets", "from marl_collect import open_dataset", ""),
        ("pyarrow", "datasets", "import marl_collect.storage.recording", ""),
        ("pyarrow", "datasets", COMMAND.format(["inspect", "x"]), ""),
        ("pyarrow", "datasets", COMMAND.format(["info", "matrix/climbing"]), "climb"),
        ("pyarrow", "datasets", COMMAND.format(["envs", "matrix"]), "climbing"),
        ("s3fs", "cloud", STORAGE.format("open_dataset('s3://bucket/x')"), ""),
        ("s3fs", "cloud", STORAGE.format("copy('d', 's3://bucket/x')"), ""),
        ("h5py", "minari", STORAGE.format("export_minari(None, 'x-v0')"), ""),
        ("tensorstore", "vault", STORAGE.format("import_vault('/', 'x')"), ""),
    ],
)
def test_what_needs_a_missing_package_says_what_to_install(
    package: str, extra: str, use: str, output: str
) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; {use}"
    process = run_python("-c", code)
    assert (process.returncode == 0) == bool(output), process.stderr
    assert output in process.stdout
    assert bool(output) != (f'pip install "marl-collect[{extra}]"' in process.stderr)
    assert ("Traceback" in process.stderr) != use.startswith("sys")


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


def test_a_copy_reads_like_the_original(
    location: Location, local: Path, tmp_path: Path
) -> None:
    url, options = location
    (local / "README.md").write_text("card")
    assert [copy(local, url, **options) for _ in range(2)] == [7, 0]
    frames = read(local)
    dataset = open_dataset(url, **options)
    assert read(dataset) == frames
    assert dataset.name == url
    dataset.verify()
    assert copy(url, tmp_path / "back", **options) == 7
    for path in local.glob("[!.]*"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    other = f"memory://store/{uuid.uuid4().hex}"
    assert copy(url, other, **options) == 7
    assert read(open_dataset(other)) == frames
    assert copy(local, f"{url}//within/", **options) == 7
    for name in ("within", "/within", "within//"):
        assert read(open_dataset(f"{url}/{name}", **options)) == frames


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
        datasets = [*pool.map(partial(open_dataset, **options), [url] * 3)]
    assert [len(dataset) for dataset in datasets] == [72] * 3
    assert sorted(transferred) == sorted([*before] * 2)
    # As a store without atomic writes may leave it when a copy is interrupted.
    place, root = fsspec.url_to_fs(url, **options)
    place.pipe_file(f"{root}/{max(before)}", b"PAR1")
    assert copy(local, url, **options) == 1
    assert read(open_dataset(url, **options)) == read(local)


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
    assert copy(tmp_path / "other", f"{url}/a", **options) == 3  # Beside what is there.
    assert len(open_dataset(f"{url}/a", **kept)) == 36 + 36


def test_a_target_of_another_kind_is_refused(
    location: Location, local: Path, tmp_path: Path
) -> None:
    url, options = location
    copy(local, url, **options)
    batch = Stream(3).batch()
    write(tmp_path / "a", [batch], DatasetDescription("other", ABOUT.environment))
    write(tmp_path / "b", [batch.exclude("frame")])
    for name, text in (
        ("a", "task is 'other', but 'stream' in the dataset"),
        ("b", r"\('frame',\) is 'missing', but 'int64"),
    ):
        with pytest.raises(ValueError, match=f"of another kind: {text}"):
            copy(tmp_path / name, url, **options)
    assert read(open_dataset(url, **options)) == read(local)


GONE: dict[str, Any] = {
    "endpoint_url": "http://127.0.0.1:9",
    "config_kwargs": {"retries": {"max_attempts": 0}},
    "key": "k",
    "secret": "s",
}
copy_gone, open_gone = partial(copy, **GONE), partial(open_dataset, **GONE)
open_writer = partial(Writer, description=ABOUT)
USES = open_dataset, open_writer, partial(copy, target="copy")
UPLOAD = "`marl-collect copy FOLDER s3://bucket/d`"
THESIS = r"others holds no dataset, but thesis\.tex"

PLACES: Any = [
    *((DatasetError, "pipe/.* is not a file: move", use, "pipe") for use in USES),
    *((DatasetError, r"mine\.parquet is not a file of", use, "mine") for use in USES),
    (DatasetError, "no time/99999999", open_writer, "no time"),
    (NotADirectoryError, "is not a folder", open_dataset, "file"),
    (NotADirectoryError, "is a file", open_writer, "file"),
    (FileNotFoundError, "not a folder of a dataset", open_dataset, "nowhere"),
    (FileNotFoundError, "no batches", open_dataset, "empty"),
    (FileExistsError, THESIS, open_writer, "others"),
    (FileExistsError, THESIS, copy, "d", "others"),
    (ValueError, UPLOAD, open_writer, "s3://bucket/d"),
    (ValueError, UPLOAD, open_writer, Path("s3://bucket/d")),
    (FileNotFoundError, "none has no batches of a dataset", copy, "none", "copy"),
    (FileNotFoundError, "memory://none has no batches", open_dataset, "memory://none"),
    (FileNotFoundError, "memory://x has no batches", open_dataset, "memory:///x"),
    (DatasetError, "lacking lacks batch 1 of the run", copy, "lacking", "copy"),
    (DatasetError, "lacking lacks batch 1 of the run", open_dataset, "lacking"),
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
    name = max(path.name for path in local.glob("*.parquet"))
    for folder in ("lacking", "pipe", "mine", "no time"):
        shutil.copytree(local, folder)
    for folder in ("empty", "others"):
        Path(folder).mkdir()
    for path in ("others/thesis.tex", "file"):
        Path(path).touch()
    min(Path("lacking").glob("*1.parquet")).unlink()
    Path("pipe", name).unlink()
    os.mkfifo(Path("pipe", name))
    Path("mine", name).rename("mine/mine.parquet")
    Path("no time", name).rename(f"no time/{'9' * 8}-{'9' * 6}-{'9' * 6}{name[22:]}")

    def listed() -> set[Path]:
        return {path for path in Path().rglob("*") if path.parts[0] != "caches"}

    before = listed()
    with pytest.raises(error, match=message):
        use(*places)
    assert listed() == before


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
        open_dataset(url, **options)
    assert not [path for path in caches.rglob("*") if "parquet" in path.name]
