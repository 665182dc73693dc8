"""What a dataset says about its frames, and where the cache is."""

import errno
import fnmatch
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

pytest.importorskip("pyarrow")

from storage_streams import ABOUT, Stream, collected, frames_of, read, write
from support.scripts import run_python

from marl_collect import open_dataset
from marl_collect.core.description import Key
from marl_collect.core.seeding import episode_seed
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    DatasetError,
    RunDescription,
    Writer,
    cache,
    copy,
)
from marl_collect.storage import dataset as opening
from marl_collect.storage.card import describe_space
from marl_collect.storage.files import BatchFile, list_files
from marl_collect.storage.statistics import Range, ranges_of

OBSERVATION = ("hunter", "observation")


def add(path: Path, seed: int, *, task: str = "c") -> None:
    """Write a run of two batches with pictures, whose episodes cross batches."""
    about, batches = collected(frames=60, batches=2, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    for batch in batches:
        shape = (*batch.shape, 2, 40, 36, 3)
        pixels = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
        batch["hunter", "image"] = pixels
    versions = {"python": "3.11" if seed < 2 else "3.12"}
    run = RunDescription(seed, {"kind": "random"}, versions=versions)
    write(path, batches, DatasetDescription(task, about.environment), run)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two runs, of which each test gets a copy."""
    folder = tmp_path_factory.mktemp("written") / "d"
    add(folder, 0)
    add(folder, 1)
    return folder


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "d")


def check(dataset: Dataset) -> None:
    """Compare the statistics with the frames and episodes themselves."""
    statistics, episodes = dataset.statistics, list(dataset.trajectories)
    frames = flatten(dataset.transitions[:])
    assert statistics.ranges == {
        key: Range(tensor.min().item(), tensor.max().item(), 0)
        for key, tensor in frames.items()
    }
    assert statistics.episodes == len(episodes) > 0
    team: Any = 0
    numbers = [(statistics.lengths, np.array(list(map(len, episodes))))]
    for group, summaries in statistics.returns.items():
        rewards = [e["next", group, "reward"].sum((0, 2)).numpy() for e in episodes]
        returns = np.array(rewards)
        team = team + returns.sum(1)
        numbers += zip(summaries, returns.T, strict=True)
    for summary, values in [*numbers, (statistics.team_return, team)]:
        expected = values.mean(), values.std(), values.min(), values.max()
        assert summary is not None
        assert tuple(vars(summary).values()) == pytest.approx(expected)


def test_statistics_equal_a_recomputation(path: Path) -> None:
    check(open_dataset(path))
    add(path.parent / "more", 2)
    check(open_dataset([path, path.parent / "more"]))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, float("nan"), -3.0], Range(-3.0, 1.0, 1)),
        ([float("nan")] * 2, Range(None, None, 2)),
        ([float("inf"), 2.0, float("-inf")], Range(float("-inf"), float("inf"))),
        ([2**62, -(2**62)], Range(-(2**62), 2**62)),
        ([True, False], Range(0, 1)),
        ([], Range()),
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), Range(1.5, 2.5)),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), Range(2**64 - 1, 2**64 - 1)),
        (torch.ones(2, dtype=torch.complex64), Range()),
    ],
)
def test_ranges_of_unusual_values(values: Any, expected: Range) -> None:
    tensor = torch.as_tensor(values)
    parts: list[dict[Key, torch.Tensor]] = [{("x",): part} for part in tensor.split(1)]
    assert ranges_of(parts) == {("x",): expected}


def test_the_card_shows_what_the_dataset_holds(path: Path) -> None:
    add(path, 2)
    dataset = open_dataset(path)
    card = dataset.card()
    assert card == open_dataset(path).card()
    assert card.startswith("# c\n")
    for line in (
        "| `('hunter', 'image')` | [2, 40, 36, 3] | uint8 | 0 | 255 | 0 |",
        "360 frames",
        "| kind=random |  | python 3.11 |",
        "| kind=random |  |  |",
        "| kind=random |  | python 3.12 |",
        "| prey | 3: prey_0, prey_1, prey_2 | Box [3]",
    ):
        assert line in card
    assert dataset.statistics.lengths is not None
    assert f"| length |  |  | {dataset.statistics.lengths.mean:,.5g} |" in card
    columns = {line.count("|") for line in card.splitlines() if line.startswith("| ")}
    assert columns <= {3, 5, 7, 8}
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace('"data"', repr(str(path))), {})
    assert "No episode is complete" not in card


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Box(-1, 2, (3,)), "Box [3] float32 in [-1, 2]"),
        (spaces.Box(0, 1, (2, 0), np.uint8), "Box [2, 0] uint8"),
        (spaces.Dict(a=spaces.Box(0, 9, (0,))), "a: Box [0] float32"),
        (spaces.MultiDiscrete([2, 3]), "MultiDiscrete([2 3])"),
    ],
)
def test_every_space_has_a_short_text(space: spaces.Space[Any], text: str) -> None:
    assert describe_space(space) == text


def test_several_folders_are_read_as_one(path: Path, tmp_path: Path) -> None:
    add(tmp_path / "e", 2)
    parts = [open_dataset(path), open_dataset(tmp_path / "e")]
    both = open_dataset([tmp_path / "e", path], cache=tmp_path / "cache")
    assert both.name == f"{tmp_path / 'e'}, {path}"
    expected = torch.cat([part.transitions[:] for part in reversed(parts)])
    assert (both.transitions[:] == expected).all()
    assert both.trajectories.seeds == [
        seed for part in reversed(parts) for seed in part.trajectories.seeds
    ]
    assert [run.seed for run in both.runs] == [2, 0, 1]
    add(tmp_path / "other", 0, task="another")
    with pytest.raises(DatasetError, match="task is 'another', but 'c' in"):
        open_dataset([path, tmp_path / "other"], cache=tmp_path / "cache")
    for twice in (path, shutil.copytree(path, tmp_path / "f")):
        with pytest.raises(ValueError, match="episodes would be read twice"):
            open_dataset([path, twice])
    with pytest.raises(ValueError, match="no folders"):
        open_dataset([])
    wrong: Any
    for wrong in (b"data", None, 3, [b"data"]):
        with pytest.raises(TypeError, match="path must be a string, a Path or a seq"):
            open_dataset(wrong)


def test_a_view_has_all_small_keys_without_copying(path: Path) -> None:
    dataset = open_dataset(path)
    numbers = torch.tensor([3, 7, 3])
    assert (dataset[1:9:3] == dataset[[1, 4, 7]]).all()
    keys = [key for key in dataset.view.keys(True, True) if "image" not in key]
    assert (dataset.view[numbers] == dataset.transitions[numbers].select(*keys)).all()
    assert len(dataset.view) == len(dataset)
    before = dataset.transitions[:][OBSERVATION].clone()
    dataset.view[OBSERVATION][0] = 77  # Of this process alone.
    assert (open_dataset(path).transitions[:][OBSERVATION] == before).all()
    dataset.verify()  # The files and the cache are as they were.


def test_the_seed_of_an_episode_follows_from_its_run(path: Path) -> None:
    trajectories = open_dataset(path).trajectories
    ids = trajectories.first(("collector", "traj_ids")).tolist()
    seeds = [trajectories.runs[run].seed for run in trajectories.run_numbers]
    assert set(seeds) == {0, 1}
    assert trajectories.seeds == [
        episode_seed(seed or 0, number >> 32, number & 0xFFFFFFFF)
        for seed, number in zip(seeds, ids, strict=True)
    ]


def test_a_selection_is_saved_as_a_dataset(path: Path, tmp_path: Path) -> None:
    """The state machine saves, too, and in several files."""
    episodes = open_dataset(path).trajectories
    long = episodes.filter(lambda episode: episode.length > 5)
    assert 0 < len(long) < len(episodes)
    few = long.select("hunter", "next", ("collector", "traj_ids"))
    for name, chosen in (("b", long), ("c", few)):
        chosen.save(tmp_path / name)
        dataset = open_dataset(tmp_path / name)
        dataset.verify()
        saved = dataset.trajectories
        assert saved.seeds == long.seeds
        assert saved.run_numbers.tolist() == long.run_numbers.tolist()
        assert (saved.transitions[:] == chosen.transitions[:]).all()
        assert saved.episodes == long.episodes
    with pytest.raises(FileExistsError):
        long.save(tmp_path / "b")
    with pytest.raises(ValueError, match="no episodes"):
        long[:0].save(tmp_path / "x")
    with pytest.raises(KeyError, match="traj_ids"):
        long.select("hunter").save(tmp_path / "x")
    assert {entry.name for entry in tmp_path.iterdir()} == {"b", "c", "d"}


def test_a_cache_that_cannot_be_written_is_elsewhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = open_dataset(path).transitions[:]
    shutil.rmtree(path / ".cache")
    monkeypatch.setattr(os, "access", lambda *_: False)  # As for a user.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert (open_dataset(path).transitions[:] == expected).all()
    assert not (path / ".cache").exists()
    assert len(list((tmp_path / "home" / "marl_collect").iterdir())) == 1


@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENFILE])
def test_a_cache_that_cannot_be_built_says_why(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    number: int,
) -> None:
    calls, sync = iter(range(100)), os.fsync

    def fail(descriptor: int) -> None:
        if next(calls) >= call:
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=os.strerror(number)) as error:
            open_dataset(path)
    advice = "pass cache=, a folder with free space"
    assert (advice in str(error.value)) == (number == errno.ENOSPC)
    other = open_dataset(path, cache=tmp_path / "cache").transitions[:]
    assert (open_dataset(path).transitions[:] == other).all()


def test_a_reader_that_waited_keeps_the_newer_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(open_dataset(path))
    states: list[bytes] = []

    def older(folder: Path) -> list[BatchFile]:
        files = list_files(folder)
        if not states:  # Meanwhile another one writes, and a third one opens it.
            states.append(b"")
            add(path, 2)
            open_dataset(path)
            states.append((path / ".cache" / "state.json").read_bytes())
        return files

    monkeypatch.setattr(opening, "list_files", older)
    assert len(open_dataset(path)) == before + 120
    assert (path / ".cache" / "state.json").read_bytes() == states[1]


def test_files_that_were_joined_are_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = Stream().batches(2)
    with Writer(tmp_path, ABOUT) as writer:
        for batch in batches:
            writer.add(batch)
            open_dataset(tmp_path)

    def refuse(file: Any, name: Path) -> Any:
        raise AssertionError(f"read {name}")

    with monkeypatch.context() as patched:
        patched.setattr(cache, "read_table", refuse)
        dataset = open_dataset(tmp_path)
    assert len(dataset.files) == 1
    assert read(dataset) == frames_of(*batches)
    dataset.verify()


@pytest.mark.parametrize("use", [open_dataset, lambda p: copy(p, p.parent / "copy")])
@pytest.mark.parametrize("overlap", ["a new file is missing", "a part is listed"])
def test_a_listing_that_overlaps_a_join_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Any, overlap: str
) -> None:
    path, scan = tmp_path / "d", os.scandir
    listings: list[list[Any]] = []
    writer = Writer(path, ABOUT)
    for batch in Stream().batches(3):
        writer.add(batch)

    @contextmanager
    def changed(folder: Any = ".") -> Iterator[Iterator[Any]]:
        with scan(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        if not listings and Path(folder) == path:
            listings.append(listed)
            if overlap == "a part is listed":
                writer.close()  # They are gone.
            else:
                listed = listed[1:]
        yield iter(listed)

    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
        return (folder / name for name in fnmatch.filter(names, pattern))

    monkeypatch.setattr(os, "scandir", changed)
    monkeypatch.setattr(Path, "glob", glob)  # Its own looks up scandir when imported.
    use(path)
    writer.close()
    assert len(listings[0]) == 3
    assert len(open_dataset(path)) == 36


@pytest.mark.processes
def test_a_missing_pyarrow_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; "
    uses = (
        "from marl_collect import open_dataset",
        "from marl_collect.storage.recording import RecordArguments",
        "sys.argv[1:] = ['inspect', 'x']; import marl_collect.cli.main as m; m.main()",
    )
    for use in uses:
        process = run_python("-c", code + use)
        assert process.returncode
        assert 'pip install "marl-collect[datasets]"' in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.processes
def test_commands_that_read_no_dataset_need_no_pyarrow() -> None:
    code = "import sys; sys.modules['pyarrow'] = None; sys.argv[1:] = {}; "
    code += "import marl_collect.cli.main as m; m.main()"
    for command in (["info", "matrix/climbing"], ["envs", "matrix"]):
        process = run_python("-c", code.format(command))
        assert not process.returncode, process.stderr
        assert "climbing" in process.stdout
