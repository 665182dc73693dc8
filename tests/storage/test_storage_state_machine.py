"""Random histories of a folder: writers, copies, deletions, damage, caches.

The model is a list of frames per run. After every step the folder is read, and datasets
that were opened before still hold what they held.
"""

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)
from storage_streams import (
    ENVIRONMENT,
    Frame,
    Stream,
    complete_episodes,
    flat_frames,
    frames_of,
    traj_id,
)

from marl_collect.storage import DatasetDescription, DatasetError
from marl_collect.storage import writer as writing
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.writer import Writer

ABOUT = DatasetDescription("stream", ENVIRONMENT)


def content(dataset: Dataset) -> list[Frame]:
    return flat_frames(dataset[np.arange(len(dataset))])


class Folder(RuleBasedStateMachine):
    """A folder, and what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="parquet-"))
        self.names = itertools.count()
        self.folder = self.root / "data"
        self.folder.mkdir()
        self.runs: dict[str, list[Frame]] = {}
        self.opened: list[tuple[Dataset, list[Frame]]] = []
        self.writers_open: set[str] = set()
        self.seeds = itertools.count()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(writing, "_MOST_PARTS", 3)

    def teardown(self) -> None:
        """Delete everything."""
        self.patch.undo()
        shutil.rmtree(self.root)

    writers: Any = Bundle("writers")

    @precondition(lambda self: len(self.writers_open) < 3)
    @rule(target=writers, n_envs=st.integers(1, 3), ragged=st.booleans())
    def open_writer(self, n_envs: int, ragged: bool) -> Any:
        writer = Writer(self.folder, ABOUT)
        self.writers_open.add(writer.run)
        return writer, Stream(next(self.seeds), n_envs, ragged=ragged)

    @rule(writer=writers, frames=st.integers(1, 5))
    def add(self, writer: Any, frames: int) -> None:
        writer, stream = writer
        batch = stream.batch(frames)
        writer.add(batch)
        self.runs.setdefault(writer.run, []).extend(frames_of(batch))

    @rule(writer=writers)
    def refuse(self, writer: Any) -> None:
        writer, _ = writer
        batch = Stream(0, 1).batch(2)
        batch["more"] = batch["frame"]
        if writer.run in self.runs:
            with pytest.raises(ValueError, match="more|continues"):
                writer.add(batch)

    @rule(writer=consumes(writers))
    def close(self, writer: Any) -> None:
        writer[0].close()
        self.writers_open.discard(writer[0].run)

    @rule(writer=consumes(writers))
    def lose(self, writer: Any) -> None:
        """Forget a writer without closing it, as if it had been killed."""
        self.writers_open.discard(writer[0].run)

    @precondition(lambda self: self.runs)
    @rule()
    def keep_open(self) -> None:
        dataset = open_dataset(self.folder)
        self.opened.append((dataset, content(dataset)))

    @rule()
    def delete_cache(self) -> None:
        shutil.rmtree(self.folder / ".cache", ignore_errors=True)

    @precondition(lambda self: not self.writers_open)
    @rule()
    def move(self) -> None:
        target = self.root / f"moved-{next(self.names)}"
        self.folder.rename(target)
        self.folder = target

    @precondition(lambda self: self.runs)
    @rule()
    def merge(self) -> None:
        """Copy the files into a folder that has another run."""
        other = self.root / f"merged-{next(self.names)}"
        with Writer(other, ABOUT) as writer:
            batch = Stream(next(self.seeds)).batch()
            writer.add(batch)
        for path in other.glob("*.parquet"):
            shutil.copy(path, self.folder)
        self.runs[writer.run] = frames_of(batch)

    def closed_runs(self) -> list[str]:
        return sorted(set(self.runs) - self.writers_open)

    # Numbers instead of names and offsets, which differ from run to run.
    @precondition(lambda self: self.closed_runs())
    @rule(number=st.integers(0, 99))
    def delete_run(self, number: int) -> None:
        runs = self.closed_runs()
        run = runs[number % len(runs)]
        for path in self.folder.glob(f"{run}.*.parquet"):
            path.unlink()
        del self.runs[run]

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 99), part=st.floats(0, 1), bit=st.integers(0, 7))
    def damage(self, number: int, part: float, bit: int) -> None:
        """Flip a bit of a file, read, and restore the file."""
        paths = sorted(self.folder.glob("*.parquet"))
        path = paths[number % len(paths)]
        before = path.read_bytes()
        changed = bytearray(before)
        changed[int(part * (len(before) - 1))] ^= 1 << bit
        path.write_bytes(changed)
        try:
            found = content(open_dataset(self.folder))
        except DatasetError as error:
            assert path.name in str(error)  # noqa: PT017
        else:
            assert found == self.expected()
        path.write_bytes(before)

    def expected(self) -> list[Frame]:
        return [frame for run in sorted(self.runs) for frame in self.runs[run]]

    @invariant()
    def reads_what_was_added(self) -> None:
        if not self.runs:
            with pytest.raises(FileNotFoundError):
                open_dataset(self.folder)
            return
        dataset = open_dataset(self.folder)
        assert content(dataset) == self.expected()
        fresh = open_dataset(self.folder, cache=self.root / f"c{next(self.names)}")
        assert content(fresh) == content(dataset)
        episodes = {
            (run, key): episode
            for run, frames in self.runs.items()
            for key, episode in complete_episodes(frames).items()
        }
        for reader in (dataset, fresh):
            assert len(reader.trajectories) == len(episodes)
        for i, data in enumerate(dataset.trajectories):
            frames = flat_frames(data)
            run = dataset.frames.cache.runs[dataset.trajectories.run_numbers[i]]
            assert frames == episodes[run, traj_id(frames[0])]

    @invariant()
    def opened_datasets_hold_what_they_held(self) -> None:
        for dataset, frames in self.opened:
            assert content(dataset) == frames


TestFolder = Folder.TestCase
TestFolder.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, derandomize=True
)
