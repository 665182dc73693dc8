"""Whole episodes on disk are complete and equal those that the environments played."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import start_python
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector, open_dataset, record
from marl_collect.errors import ClosedError
from marl_collect.models import make_policy
from marl_collect.storage import (
    BackgroundWriter,
    DatasetDescription,
    EpisodeWriter,
    Writer,
)
from marl_collect.storage.recording import RecordArguments, collect_into


def writer(path: Path, collector: Collector) -> Writer:
    return Writer(path, DatasetDescription("counting", collector.description))


def test_record_writes_the_first_episodes_of_every_environment(tmp_path: Path) -> None:
    policy = make_policy(CountingEnv)
    options: Any = {"num_workers": 2, "envs_per_worker": 2}
    dataset = record(tmp_path, CountingEnv, policy, episodes=9, seed=3, **options)
    with MultiSyncCollector(
        CountingEnv, policy, frames_per_batch=2000, seed=3, **options
    ) as collector:
        rows = collector.next()
    played = []
    for k, row in enumerate(rows):
        ends = row["next", "done"][:, 0].nonzero()[:, 0].tolist()
        begin = 0
        # Three from the first environment, and two from each of the other three.
        for end in ends[: 3 if k == 0 else 2]:
            rewards = row["next"][begin : end + 1]
            returns = {
                group: tuple(rewards[group, "reward"].double().sum(0)[:, 0].tolist())
                for group in ("hunter", "prey")
            }
            played.append((end + 1 - begin, returns))
            begin = end + 1
    assert len(dataset.trajectories) == len(played) == 9
    episodes = sorted(
        (int(t["collector", "traj_ids"][0]), len(t), e.returns)
        for t, e in zip(
            dataset.trajectories, dataset.trajectories.episodes, strict=True
        )
    )
    assert [(length, dict(returns)) for _, length, returns in episodes] == played
    for episode in dataset.trajectories:
        done = episode["next", "done"].flatten()
        assert done[-1]
        assert not done[:-1].any()
        assert len(episode["collector", "traj_ids"].unique()) == 1
    assert len(dataset) == sum(length for length, _ in played)


def test_recorded_data_equal_the_collectors(tmp_path: Path) -> None:
    dataset = record(
        tmp_path, CountingEnv, episodes=4, num_workers=2, seed=5, frames_per_batch=14
    )
    collector = Collector([CountingEnv] * 2, frames_per_batch=400, seed=5)
    truth = collector.next().flatten()
    for episode in dataset.trajectories:
        number = episode["collector", "traj_ids"][0]
        episode_frames = truth[truth["collector", "traj_ids"] == number]
        assert (episode_frames == episode).all()


def test_the_description_has_the_policy_and_the_options(tmp_path: Path) -> None:
    policy = make_policy(CountingEnv)
    about: Any = {"task": "count", "env_kwargs": {"n": 2}, "max_frames_per_traj": 4}
    dataset = record(tmp_path / "a", CountingEnv, policy, frames=40, seed=1, **about)
    assert len(dataset) == 40
    assert dataset.description.task == "count"
    assert dataset.description.env_kwargs == {"n": 2}
    (run,) = dataset.runs
    assert run.seed == 1
    assert run.options["max_frames_per_traj"] == 4
    assert run.policy["parameters"] == sum(p.numel() for p in policy.parameters())
    record(tmp_path / "a", CountingEnv, policy, frames=40, **about)
    with torch.no_grad():
        next(policy.parameters()).add_(1)
    record(tmp_path / "a", CountingEnv, policy, frames=40, **about)
    runs = open_dataset(tmp_path / "a").runs
    digests = [run.policy["sha256"] for run in runs]
    assert digests[0] == digests[1] != digests[2]
    assert len({run.seed for run in runs}) == 3
    assert record(tmp_path / "b", CountingEnv, episodes=1).runs[0].policy == {
        "kind": "random"
    }


def test_invalid_arguments_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="either episodes or frames"):
        record(tmp_path, CountingEnv)
    with pytest.raises(ValueError, match="either episodes or frames"):
        record(tmp_path, CountingEnv, episodes=1, frames=1)
    with pytest.raises(TypeError, match="record takes no total_frames: record"):
        record(tmp_path, CountingEnv, frames=1, total_frames=2, cat_results=0)
    amount: Any
    sources: Any = {"policy": None}
    for amount in ({"episodes": 1}, {"frames": 10}):
        with pytest.raises(TypeError, match="set_truncated would split episodes"):
            record(tmp_path, CountingEnv, set_truncated=True, **amount)
        with pytest.raises(TypeError, match="receives no weights: omit it"):
            record(tmp_path, CountingEnv, weight_recv_schemes=sources, **amount)
    with pytest.raises(ValueError, match="episodes must be an integer of at least 1"):
        record(tmp_path, CountingEnv, episodes=0)
    assert list(tmp_path.iterdir()) == []
    collector = Collector(CountingEnv, frames_per_batch=5, track_traj_ids=False)
    with (
        EpisodeWriter(writer(tmp_path / "d", collector)) as episode_writer,
        pytest.raises(KeyError, match="collect with track_traj_ids=True"),
    ):
        episode_writer.add(collector.next())


def test_no_thread_sees_a_new_writer_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(CountingEnv, frames_per_batch=10, total_frames=10, seed=0)
    batch = collector.next()
    assert batch is not None
    seen: list[bool] = []

    def spy(self: EpisodeWriter, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in ("_writer", "_wanted", "_frames", "_assembler", "_waiting"):
            seen.append(hasattr(self, "_taken") and self.complete)

    with EpisodeWriter(writer(tmp_path / "d", collector), 100) as episodes:
        monkeypatch.setattr(EpisodeWriter, "__setattr__", spy)
        episodes.add(batch)
    assert len(seen) > 1
    assert not any(seen)


def test_an_error_before_the_first_batch_leaves_nothing(tmp_path: Path) -> None:
    writers: list[Writer] = []

    def fail(_: object, writer: Writer) -> None:
        writers.append(writer)
        raise BrokenPipeError

    arguments = RecordArguments(tmp_path / "d", CountingEnv, frames=10)
    with pytest.raises(BrokenPipeError):
        collect_into(arguments, on_start=fail)
    assert "closed" in repr(writers[0])
    assert not (tmp_path / "d").exists()


def test_an_error_closes_the_writer_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("broken disk")

    collector = Collector(
        [CountingEnv] * 3, frames_per_batch=15, total_frames=300, seed=2
    )
    episode_writer = EpisodeWriter(writer(tmp_path / "d", collector), frames=50)
    batches = enumerate([batch.clone() for batch in collector])
    episodes: list[object] = []

    def write() -> None:
        for number, batch in batches:
            if number == 10:
                monkeypatch.setattr(os, "fsync", fail)
            episodes.extend(episode_writer.add(batch))

    with pytest.raises(OSError, match="broken disk"):
        write()
    monkeypatch.undo()
    with pytest.raises(ClosedError, match="could not be written: broken disk"):
        write()
    episode_writer.close()
    dataset = open_dataset(tmp_path / "d")
    dataset.verify()
    assert list(dataset.trajectories.episodes) == episodes
    assert len(episodes) > 3


def test_without_a_number_every_complete_episode_is_written(tmp_path: Path) -> None:
    collector = Collector(
        [CountingEnv] * 3, frames_per_batch=15, total_frames=600, seed=2
    )
    reported: list[object] = []
    episode_writer = EpisodeWriter(writer(tmp_path / "d", collector), frames=50)
    with BackgroundWriter(episode_writer, reported.extend) as background:
        for batch in collector:
            background.add(batch)
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset.trajectories) == collector.stats()["episodes"]
    assert len(dataset) > 3
    assert list(dataset.trajectories.episodes)[: len(reported)] == reported


KILLED = """
import os, sys
from marl_collect import Collector
from marl_collect.storage import DatasetDescription, EpisodeWriter, Writer
from workloads.counting import CountingEnv

collector = Collector([CountingEnv] * 2, frames_per_batch=30, seed=3)
writer = Writer(sys.argv[1], DatasetDescription("counting", collector.description))
whole = EpisodeWriter(writer, frames=60)
said = 0
for batch in collector:
    said += len(whole.add(batch))
    os.write(1, f"{said}\\n".encode())
"""


def test_episodes_reported_as_written_survive_a_kill(tmp_path: Path) -> None:
    with start_python("-c", KILLED, tmp_path / "d") as program:
        assert program.stdout is not None
        for line in program.stdout:
            if int(line) > 40:
                break
        program.kill()
        n_reported = [int(line), *map(int, program.stdout.read().split())][-1]
    trajectories = open_dataset(tmp_path / "d").trajectories
    assert len(trajectories) >= n_reported
    for episode in trajectories:
        assert episode["next", "done"][-1].all()
        assert episode["next", "done"].sum() == 1
