"""What a dataset says about its frames, and where the cache is."""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

from marl_collect import open_dataset
from marl_collect.core.seeding import episode_seed
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import Dataset, DatasetError, Writer, copy, copying, files
from marl_collect.storage import dataset as opening
from marl_collect.storage.card import describe_space
from marl_collect.storage.statistics import Range


@pytest.fixture
def path(dataset: Dataset, tmp_path: Path) -> Path:
    """A copy of a dataset of two runs."""
    ignored = shutil.ignore_patterns(".cache")
    return shutil.copytree(dataset.name, tmp_path / "d", ignore=ignored)


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
    returns = {
        (group, f"{group}_{agent}"): [
            float(episode["next", group, "reward"][:, agent].sum())
            for episode in trajectories
        ]
        for group, agents in (("hunter", 2), ("prey", 3))
        for agent in range(agents)
    }
    sums = [*map(sum, zip(*returns.values(), strict=True))]
    numbers = {("all", "team sum"): sums, ("all", "length"): [*map(len, trajectories)]}
    rows = [
        (*names, *(f"{f(values):,.5g}" for f in (np.mean, np.std, np.min, np.max)))
        for names, values in (numbers | returns).items()
    ]
    stats = trajectories.stats()
    expected = np.mean(list(returns.values()), 1)
    assert stats["mean_length"] == pytest.approx(trajectories.lengths.mean())
    assert stats["mean_team_return"] == pytest.approx(expected.sum())
    assert stats["mean_agent_return"] == pytest.approx(expected.mean())
    assert stats["mean_returns"]["hunter"] == pytest.approx(expected[:2])
    assert stats["mean_group_returns"]["prey"] == pytest.approx(expected[2:].mean())
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


def test_several_folders_are_read_as_one(path: Path, tmp_path: Path) -> None:
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


def test_a_selection_is_saved_as_a_dataset(path: Path, tmp_path: Path) -> None:
    """The state machine saves, too, and in several files."""
    few = open_dataset(path).trajectories[::2]
    few = few.select("hunter", "next", ("collector", "traj_ids"))
    few.save(tmp_path / "b")
    saved = open_dataset(tmp_path / "b").trajectories
    assert saved.seeds == few.seeds
    assert (saved.transitions[:] == few.transitions[:]).all()
    refusals: Any = (
        (FileExistsError, "exists", few, "b"),
        (ValueError, "no episodes", few[:0], "x"),
        (KeyError, "traj_ids", few.select("hunter"), "x"),
    )
    for error, message, selection, name in refusals:
        with pytest.raises(error, match=message):
            selection.save(tmp_path / name)
    assert {entry.name for entry in tmp_path.iterdir()} == {"b", "d"}


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


@pytest.mark.parametrize("call", range(10))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENFILE])
def test_a_cache_that_cannot_be_built_says_why(
    path: Path, tmp_path: Path, call: int, number: int
) -> None:
    with failing(call, number), pytest.raises(BrokenDiskError) as error:
        open_dataset(path)
    advice = "pass cache=, a folder with free space"
    assert (advice in str(error.value)) == (number == errno.ENOSPC)
    other = open_dataset(path, cache=tmp_path / "cache").transitions[:]
    assert (open_dataset(path).transitions[:] == other).all()


def test_a_deleted_run_is_no_part_of_the_joined_file_behind_it(tmp_path: Path) -> None:
    batches = Stream().batches(3)
    deleted = write(tmp_path, batches[:1])
    write(tmp_path, batches[1:])
    assert read(tmp_path) == frames_of(*batches)
    for path in tmp_path.glob(f"{deleted}.*"):
        path.unlink()
    assert read(tmp_path) == frames_of(*batches[1:])


def test_a_reader_that_waited_keeps_the_newer_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(open_dataset(path))
    states: list[bytes] = []

    def older(folder: Path) -> list[files.BatchFile]:
        listed = files.list_files(folder)
        if not states:  # Meanwhile another one writes, and a third one opens it.
            states.append(b"")
            add_run(path, 2)
            open_dataset(path)
            states.append((path / ".cache" / "state.json").read_bytes())
        return listed

    monkeypatch.setattr(opening, "list_files", older)
    assert len(open_dataset(path)) == before + 300
    assert (path / ".cache" / "state.json").read_bytes() == states[1]


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


COMMAND = "sys.argv[1:] = {}; import marl_collect.cli.main as m; m.main()"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("use", "output"),
    [
        ("from marl_collect import open_dataset", ""),
        ("from marl_collect.storage.recording import RecordArguments", ""),
        (COMMAND.format(["inspect", "x"]), ""),
        (COMMAND.format(["info", "matrix/climbing"]), "climbing"),
        (COMMAND.format(["envs", "matrix"]), "climbing"),
    ],
)
def test_what_needs_pyarrow_says_what_to_install(use: str, output: str) -> None:
    process = run_python("-c", f"import sys; sys.modules['pyarrow'] = None; {use}")
    assert (process.returncode == 0) == bool(output), process.stderr
    assert output in process.stdout
    assert bool(output) != ('pip install "marl-collect[datasets]"' in process.stderr)
    assert ("Traceback" in process.stderr) == use.startswith("from")
