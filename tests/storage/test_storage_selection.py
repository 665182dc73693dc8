"""Every way of reading a dataset returns the collected data."""

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from marl_collect import open_dataset


def test_an_episode_has_its_time_its_groups_and_its_returns(recording: Any) -> None:
    trajectories = recording.dataset.trajectories
    assert len(trajectories) > 20
    for number, episode, info in zip(
        trajectories.run_numbers, trajectories, trajectories.episodes, strict=True
    ):
        rows = recording.runs[number]
        key = ("collector", "traj_ids")
        expected = rows[rows[key] == episode[key][0]]
        assert (episode == expected).all()
        assert episode.batch_size == (info.length,) == expected.batch_size
        assert episode["hunter"].batch_size == expected["hunter"].batch_size
        assert episode.names == ["time"]
        rewards = sum(expected["next", g, "reward"].sum() for g in ("hunter", "prey"))
        assert info.team_return == pytest.approx(float(rewards))
    assert max(trajectories.lengths) > 10  # Frames of a batch's row.


def test_samples_are_whole_episodes(recording: Any) -> None:
    trajectories = recording.dataset.trajectories
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    padded = trajectories.sample(8, generator=generators[0])
    indices = torch.randint(len(trajectories), (8,), generator=generators[1]).tolist()
    episodes = [trajectories[i] for i in indices]
    longest = max(map(len, episodes))
    assert padded.shape == (8, longest)
    assert padded.names == [None, "time"]
    for row, episode in zip(padded, episodes, strict=True):
        assert row["collector", "mask"].sum() == len(episode)
        frames = row[: len(episode)]
        frames["collector"].pop("mask")
        assert (frames == episode).all()
        padding = row[len(episode) :].flatten_keys().values()
        assert not any(value.any() for value in padding)


def test_frames_are_read_in_any_order_as_copies(recording: Any, tmp_path: Path) -> None:
    transitions, flat = recording.dataset.transitions, recording.frames
    assert len(transitions) == len(flat) == 600
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(600, dtype=torch.bool)
    mask[[3, 598]] = True
    mixed = [torch.tensor(3), np.int32(4), -600, 5, 5]
    for index in (
        slice(None),
        slice(10, 400, 7),
        -1,
        order,
        mask,
        mask.tolist(),
        mixed,
    ):
        chosen = torch.as_tensor(index) if isinstance(index, list) else index
        expected = flat[chosen]
        read = transitions[index]
        assert (read == expected).all()
        assert read.batch_size == expected.batch_size
        assert read["hunter"].batch_size == (*expected.batch_size, 2)
        read.zero_()
        assert (transitions[index] == expected).all()
    assert transitions[[]].shape == transitions[~mask & mask].shape == (0,)
    # The maps must not prevent pickling, nor be copied; nor our class loading.
    pickled = pickle.dumps(transitions)
    assert len(pickled) < 20_000 < recording.dataset.nbytes
    assert (pickle.loads(pickled)[:] == flat).all()
    transitions[:4].memmap(tmp_path / "frames")
    assert (TensorDict.load_memmap(tmp_path / "frames") == flat[:4]).all()
    for number in (600, -601, [0, 600]):
        with pytest.raises(IndexError, match="Frame .* is out of range: there are 600"):
            transitions[number]
    for wrong in (mask[:599], True, 1.5, torch.ones(2), [[1, 2]], mask[:, None], None):
        with pytest.raises(TypeError, match="a list of integers, or 600 booleans"):
            transitions[wrong]


def test_data_that_do_not_fit_into_memory_are_read(
    recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marl_collect.storage.frames.free_memory", lambda: 1)
    frames = open_dataset(recording.dataset.name).transitions
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    assert (frames[order] == recording.frames[order]).all()


def test_wrong_numbers_are_named(recording: Any) -> None:
    dataset, episodes = recording.dataset, recording.dataset.trajectories
    numbers: list[Any] = [-1, "3", 1.5, True]
    for wrong in numbers:
        for parts in (dataset.transitions, episodes):
            with pytest.raises((TypeError, ValueError), match="n must be an integer"):
                parts.sample(wrong)
    for index in ((n := len(episodes)), -n - 1):
        message = f"Episode {index} is out of range: there are {n}"
        with pytest.raises(IndexError, match=message):
            episodes[index]


def test_samples_are_uniform_and_reproducible(recording: Any) -> None:
    frames = recording.dataset.transitions.select(key := ("collector", "traj_ids"))
    draw, repeated = (
        frames.sample(60_000, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    )
    assert (draw == repeated).all()
    ids, counts = draw[key].unique(return_counts=True)
    all_ids, expected = recording.frames[key].unique(return_counts=True)
    assert torch.equal(ids, all_ids)
    share = counts / 60_000 - expected / 600
    assert share.abs().max() < 0.006  # Five standard errors of the largest share.


def test_parts_by_return_are_ordered_and_complete(recording: Any) -> None:
    episodes = recording.dataset.trajectories
    parts = episodes.split_by_return()
    assert sum(map(len, parts)) == len(episodes)
    for below, above in pairwise(parts):
        assert below.returns.max() < above.returns.min()
    wrong: Any
    for wrong in ([0.5, 0.5], [0], [0.5, 0.2], [1.0], 0.5, "1", [None]):
        with pytest.raises((TypeError, ValueError), match="quantiles must .*ascend"):
            episodes.split_by_return(wrong)
    assert len(episodes.split_by_return(np.array([0.5]))) == 2


def test_equal_returns_go_into_one_part(recording: Any) -> None:
    episodes = recording.dataset.trajectories
    tied = episodes._take(np.zeros(10, np.int64))
    assert [len(part) for part in tied[:0].split_by_return()] == [0, 0, 0]
    assert sorted(map(len, tied[:1].split_by_return([0.5]))) == [0, 1]
    assert [len(part) for part in tied.split_by_return([0.8])] == [0, 10]


def test_a_selection_has_only_its_frames_and_keys(recording: Any) -> None:
    episodes = recording.dataset.trajectories
    short = episodes.filter(lambda e: e.length <= 12)
    assert 0 < len(short) < len(episodes)
    assert short.lengths.max() <= 12
    assert (short.transitions[:] == torch.cat(list(short))).all()
    assert [len(t) for t in short[2:5]] == short.lengths[2:5].tolist()
    assert repr(short).endswith(f"{len(short)} episodes, {short.lengths.sum()} frames)")
    selection = episodes.select(("hunter", "observation"), "state", "next")[0]
    assert set(selection.keys()) == {"hunter", "state", "next"}
    assert set(selection["hunter"].keys()) == {"observation"}
    assert (selection == episodes[0].select(*selection.keys(True, True))).all()
    with pytest.raises(KeyError, match="There is no key hunter/position"):
        episodes.select(("hunter", "position"))
