"""Whole episodes on disk are complete and equal those that the environments played."""

from pathlib import Path
from typing import Any

import pytest
import torch
from storage_streams import collected
from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector, open_dataset, record
from marl_collect.models import make_policy
from marl_collect.storage import Writer
from marl_collect.storage.recording import EpisodeWriter, RecordArguments, collect_into


@pytest.mark.processes
def test_record_writes_the_first_episodes_of_every_environment(tmp_path: Path) -> None:
    policy = make_policy(CountingEnv)
    options: Any = {"num_workers": 2, "envs_per_worker": 2}
    dataset = record(tmp_path, CountingEnv, policy, episodes=9, seed=3, **options)
    with MultiSyncCollector(
        CountingEnv, policy, frames_per_batch=2000, seed=3, **options
    ) as collector:
        rows = collector.next()
    ids = rows["collector", "traj_ids"]
    # Three from the first environment, and two from each of the other three.
    chosen = [(k << 32) + n for k in range(4) for n in range(3 if k == 0 else 2)]
    played = {number: rows[ids == number] for number in chosen}
    assert len(dataset) == sum(map(len, played.values()))
    trajectories = dataset.trajectories
    for episode, info in zip(trajectories, trajectories.episodes, strict=True):
        expected = played.pop(info.traj_id)
        assert (episode == expected).all()
        assert expected["next", "done"][-1].all()
        for group in ("hunter", "prey"):
            rewards = expected["next", group, "reward"].double().sum(0)
            assert info.returns[group] == tuple(rewards.flatten().tolist())
    assert not played


@pytest.mark.processes
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
    with pytest.raises(ValueError, match="omit it, or pass frames instead"):
        record(tmp_path, CountingEnv, episodes=1, reset_at_each_iter=True)
    with pytest.raises(ValueError, match="episodes must be an integer of at least 1"):
        record(tmp_path, CountingEnv, episodes=0)
    assert list(tmp_path.iterdir()) == []


def test_episodes_that_never_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marl_collect.buffers.trajectories.LONGEST", 40)
    for limit in (None, 60):
        about, batches = collected(
            2, frames=16, batches=10, max_frames_per_traj=limit, endless=True
        )
        with EpisodeWriter(Writer(tmp_path / f"{limit}", about), 2) as writer:
            for batch in batches[:5]:
                writer.add(batch)
            if limit is None:
                with pytest.raises(RuntimeError, match="48 frames.*max_frames_per_tr"):
                    writer.add(batches[5])


@pytest.mark.processes
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


def test_episodes_of_compact_batches_have_their_last_observations(
    tmp_path: Path,
) -> None:
    views = []
    for name, compact in (("plain", False), ("compact", True)):
        about, batches = collected(2, frames=16, batches=8, compact_obs=compact)
        with EpisodeWriter(Writer(tmp_path / name, about), 4) as writer:
            for batch in batches:
                writer.add(batch)
        views.append(open_dataset(tmp_path / name).view)
    assert ("next", "hunter", "observation") in views[1].keys(True)
    assert (views[0] == views[1]).all()
