"""Random histories of a folder: writers, copies, deletions, caches.

The model is a list of frames per run. After every step the folder is read, and datasets
that were opened before still hold what they held. Kills and damages are in
``test_storage_damage``.
"""

import itertools
import os
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from storage_streams import (
    ABOUT,
    Frame,
    Stream,
    complete_episodes,
    ended_episode,
    flat_frames,
    frames_of,
    read,
    traj_id,
)

from marl_collect.storage import (
    Dataset,
    EndedEpisode,
    Writer,
    copy,
    files,
    open_dataset,
    trajectories,
)
from marl_collect.storage import writer as writing

# Numbers instead of names and offsets, which differ from run to run.
NUMBERS = st.integers(0, 999)
FRAMES = st.sampled_from([1, 3, 6])
BEGUN = st.sampled_from(["seen", "unseen", "some"])
SET_BACK = SimpleNamespace(
    now=lambda zone: datetime(2000, 1, 1, tzinfo=zone), strptime=datetime.strptime
)


class Folder(RuleBasedStateMachine):
    """A folder, and what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="parquet-"))
        self.names = itertools.count()
        self.folder = self.root / "data"
        self.folder.mkdir()
        self.runs: dict[str, list[Frame]] = {}
        self.copied: dict[str, list[Frame]] = {}
        self.unseen: set[tuple[str, int]] = set()
        self.opened: list[tuple[Dataset, list[Frame]]] = []
        self.writers_open: set[str] = set()
        self.seeds = itertools.count()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(writing, "_MOST_PARTS", 3)
        self.patch.setattr(writing, "_SMALL_BYTES", 1100)
        self.patch.setattr(trajectories, "_FILE_BYTES", 2000)
        self.patch.setattr(os, "fsync", lambda _: None)  # Nothing is killed here.

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.root)

    writers: Any = Bundle("writers")

    def stream(self, n_envs: int = 2, **options: Any) -> Stream:
        seed, says_begin = next(self.seeds), self.says_begin
        return Stream(seed, n_envs, says_begin=says_begin, **options)

    @initialize(
        target=writers, ragged=st.booleans(), begun=BEGUN, says_begin=st.booleans()
    )
    def begin(self, ragged: bool, begun: str, says_begin: bool) -> Any:
        """Write a run of several files, which the writer may still join."""
        self.says_begin = says_begin
        writer = self.open_writer(2, ragged, begun)
        for frames in (4, 6, 4):  # The second batch is large.
            self.add(writer, frames, batches=1)
        return writer

    @precondition(lambda self: len(self.writers_open) < 3)
    @rule(
        target=writers,
        n_envs=st.integers(1, 3),
        ragged=st.booleans(),
        begun=BEGUN,
        is_set_back=st.booleans(),
    )
    def open_writer(
        self, n_envs: int, ragged: bool, begun: str, is_set_back: bool = False
    ) -> Any:
        """Open a writer, perhaps while the clock is set back.

        The collector may have run before: some or all episodes have begun.
        """
        with pytest.MonkeyPatch.context() as patch:
            if is_set_back:
                patch.setattr(files, "datetime", SET_BACK)
            writer = Writer(self.folder, ABOUT)
        assert writer.run > max((path.name for path in self.files()), default="")
        self.writers_open.add(writer.run)
        stream = self.stream(n_envs, ragged=ragged, begun=begun != "unseen")
        while begun == "some" and not stream.episode.any():
            stream.batch(1)
        if not self.says_begin and stream.episode.any():
            ids = np.arange(n_envs) << 32 | stream.episode
            self.unseen |= {(writer.run, number) for number in ids.tolist()}
        return writer, stream

    @rule(writer=writers, frames=FRAMES, batches=st.integers(1, 3))
    def add(self, writer: Any, frames: int, batches: int) -> None:
        writer, stream = writer
        for _ in range(batches):
            batch = stream.batch(frames)[[*range(stream.n_envs)][::-1]]
            before = self.ended(writer.run)
            ended = writer.add(batch)
            self.runs.setdefault(writer.run, []).extend(frames_of(batch))
            assert self.ended(writer.run) == before + ended
            # Episodes whose numbers have been, and other keys, are refused.
            refused = self.stream(1).batch(2)
            if self.says_begin or stream.episode[0]:
                with pytest.raises(ValueError, match="continues|open a new Writer"):
                    writer.add(refused)
            refused["more"] = refused["frame"]
            with pytest.raises(ValueError, match="more|continues|comes after"):
                writer.add(refused)
            if frames_of(batch)[-1]["next", "done"] == b"\1":
                with pytest.raises(ValueError, match="continues|open a new Writer"):
                    writer.add(batch)

    @rule(writer=consumes(writers), is_killed=st.booleans())
    def end(self, writer: Any, is_killed: bool) -> None:
        """Forget a writer, or close it: small files are copied, but not decoded."""
        self.writers_open.discard(writer[0].run)
        if is_killed:
            return
        for _ in range(2):
            self.add(writer, frames=1, batches=1)
        before = self.generations()
        writer[0].close()
        assert self.generations() == before

    def generations(self) -> list[str]:
        """Copy what is new to a store, and return the caches of here and there."""
        url = f"memory://{self.root.name}"
        copy(self.folder, url)
        assert copy(self.folder, url) == 0
        stored = fsspec.filesystem("memory").ls(f"/{self.root.name}", detail=False)
        names = {path.rpartition("/")[2] for path in stored}
        more = names - {path.name for path in self.files()}
        assert not {name.partition(".")[0] for name in more} & self.runs.keys()
        here = open_dataset(self.folder)
        there = open_dataset(url, cache=self.root / "fetched")
        self.copied |= self.runs  # A store keeps the runs that are deleted here.
        runs = sorted(self.copied)
        assert read(there) == [frame for run in runs for frame in self.copied[run]]
        return [d.transitions.cache.state.generation for d in (here, there)]

    @rule()
    def keep_open(self) -> None:
        dataset = open_dataset(self.folder)
        self.opened.append((dataset, read(dataset)))

    @rule()
    def delete_cache(self) -> None:
        shutil.rmtree(self.folder / ".cache", ignore_errors=True)

    @rule()
    def move(self) -> None:
        """Move the folder, which writers follow, and put another one into its place."""
        target = self.root / f"moved-{next(self.names)}"
        self.folder.rename(target)
        self.folder.mkdir()
        (self.folder / "thesis.tex").touch()
        self.folder = target

    @precondition(lambda self: self.episodes())
    @rule(number=NUMBERS)
    def save(self, number: int) -> None:
        """Save every second or third episode, and merge what was saved."""
        dataset = open_dataset(self.folder)
        chosen = dataset.trajectories[number % 2 :: 2 + number % 2]
        if not len(chosen):
            return
        other = self.root / f"saved-{next(self.names)}"
        chosen.save(other)
        saved = open_dataset(other)
        assert len(saved.trajectories) == len(chosen)
        by_run: dict[int, list[Frame]] = {}
        for run, data in zip(chosen.run_numbers, chosen, strict=True):
            by_run.setdefault(run, []).extend(flat_frames(data))
        runs = sorted({file.run for file in saved.files})
        frames = [by_run[run] for run in sorted(by_run)]
        assert read(saved) == [frame for part in frames for frame in part]
        for path in other.glob("*.parquet"):
            assert not (self.folder / path.name).exists()
            shutil.copy(path, self.folder)
        self.runs |= dict(zip(runs, frames, strict=True))

    def closed_runs(self) -> list[str]:
        return sorted(set(self.runs) - self.writers_open)

    def files(self, run: str = "") -> list[Path]:
        """Return the files of a run, or all, as numbers say."""
        return sorted(self.folder.glob(f"{run}*.parquet"))

    @precondition(lambda self: self.closed_runs())
    @rule(number=NUMBERS, whole=st.booleans())
    def delete(self, number: int, whole: bool) -> None:
        """Delete a run, or replace its files by others without one of its episodes."""
        runs = self.closed_runs()
        run = runs[number % len(runs)]
        if whole and len(self.runs) > 1:
            for path in self.files(run):
                path.unlink()
            del self.runs[run]
            return
        ids = sorted({traj_id(frame) for frame in self.runs[run]})
        deleted = ids[number // 7 % len(ids)]
        paths = self.files(run)
        tables = [pq.read_table(path) for path in paths]
        tables = [t.filter(pc.field("collector.traj_ids") != deleted) for t in tables]
        if not all(map(len, tables)):
            return
        for path, table in zip(paths, tables, strict=True):
            pq.write_table(table, path, write_page_checksum=True)
        self.runs[run] = [f for f in self.runs[run] if traj_id(f) != deleted]

    def expected(self) -> list[Frame]:
        return [frame for run in sorted(self.runs) for frame in self.runs[run]]

    def episodes(self) -> dict[tuple[str, int], list[Frame]]:
        return {
            (run, key): episode
            for run, frames in sorted(self.runs.items())
            for key, episode in complete_episodes(frames).items()
            if (run, key) not in self.unseen
        }

    def ended(self, of_run: str = "") -> list[EndedEpisode]:
        """Return what is known of the complete episodes, in the order of their ends."""
        return [
            ended_episode(episode)
            for (run, _), episode in self.episodes().items()
            if of_run in ("", run)
        ]

    @invariant()
    def reads_what_was_added(self) -> None:
        dataset = open_dataset(self.folder)
        assert read(dataset) == self.expected()
        fresh = open_dataset(self.folder, cache=self.root / f"c{next(self.names)}")
        assert read(fresh) == read(dataset)
        episodes = self.episodes()
        for reader in (dataset, fresh):
            assert reader.trajectories.episodes == self.ended()
        runs = list(dataset.transitions.cache.state.runs)
        for data, run in zip(
            dataset.trajectories, dataset.trajectories.run_numbers, strict=True
        ):
            frames = flat_frames(data)
            assert frames == episodes[runs[run], traj_id(frames[0])]

    @invariant()
    def others_are_as_they_were(self) -> None:
        for dataset, frames in self.opened:
            assert read(dataset) == frames
        for path in self.root.glob("*/thesis.tex"):
            assert os.listdir(path.parent) == ["thesis.tex"]


TestFolder = Folder.TestCase
TestFolder.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, derandomize=True
)
