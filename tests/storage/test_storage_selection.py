"""Every way of reading a dataset returns the collected data."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from marl_collect import split_trajectories


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


def test_frames_are_stored_in_order_and_read_in_any_order(recording: Any) -> None:
    transitions, flat = recording.dataset.transitions, recording.frames
    assert len(transitions) == len(flat) == 600
    assert (transitions[:] == flat).all()
    assert (transitions[10:400:7] == flat[10:400:7]).all()
    assert (transitions[-1] == flat[-1]).all()
    assert transitions[3].batch_size == ()
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    frames = transitions[order]
    assert (frames == flat[order]).all()
    assert frames["hunter"].batch_size == (600, 2)
    assert (transitions[[5, 5, -600]] == flat[[5, 5, 0]]).all()
    for index in (600, -601, [0, 600]):
        with pytest.raises(IndexError, match="Frame .* is out of range: there are 600"):
            transitions[index]
    # The maps must not prevent pickling.
    assert (pickle.loads(pickle.dumps(transitions))[:] == flat).all()


def test_frames_are_indexed_by_integers_and_booleans_only(recording: Any) -> None:
    transitions = recording.dataset.transitions
    mask = torch.zeros(600, dtype=torch.bool)
    mask[[3, 598]] = True
    for mask_form in (mask, mask.numpy(), mask.tolist()):
        assert (transitions[mask_form] == transitions[[3, 598]]).all()
    assert transitions[[]].shape == transitions[~mask & mask].shape == (0,)
    assert (transitions[[torch.tensor(3), np.int32(4)]] == transitions[3:5]).all()
    for index in (mask[:599], True, 1.5, torch.ones(2), [[1, 2]], mask[:, None], None):
        with pytest.raises(TypeError, match="a list of integers, or 600 booleans"):
            transitions[index]


def test_wrong_numbers_are_named(recording: Any) -> None:
    dataset = recording.dataset
    trajectories = dataset.trajectories
    n = len(trajectories)
    numbers: list[Any] = [-1, "3", 1.5, True]
    for wrong in numbers:
        for parts in (dataset.transitions, trajectories):
            with pytest.raises(ValueError, match="n must be an integer of at least 0"):
                parts.sample(wrong)
    for index in (n, -n - 1):
        message = f"Episode {index} is out of range: there are {n}"
        with pytest.raises(IndexError, match=message):
            trajectories[index]
    with pytest.raises(IndexError, match="Frame 600 is out of range: there are 600"):
        dataset[600]
    with pytest.raises(TypeError, match=r"such as \[0.5\], but is 0.5"):
        trajectories.split_by_return(0.5)


def test_samples_are_uniform_and_reproducible(recording: Any) -> None:
    key = ("collector", "traj_ids")
    transitions = recording.dataset.transitions.select(key)
    draw = transitions.sample(60_000, generator=torch.Generator().manual_seed(1))
    repeated = transitions.sample(60_000, generator=torch.Generator().manual_seed(1))
    assert (draw == repeated).all()
    ids, counts = draw[key].unique(return_counts=True)
    all_ids, expected = recording.frames[key].unique(return_counts=True)
    assert torch.equal(ids, all_ids)
    share = counts / 60_000 - expected / 600
    assert share.abs().max() < 0.006  # Five standard errors of the largest share.


def test_padded_and_concatenated_samples_have_whole_episodes(recording: Any) -> None:
    trajectories = recording.dataset.trajectories
    generators = [torch.Generator().manual_seed(4) for _ in range(3)]
    padded = trajectories.sample(8, generator=generators[0])
    joined = trajectories.sample(8, form="cat", generator=generators[1])
    indices = torch.randint(len(trajectories), (8,), generator=generators[2]).tolist()
    episodes = [trajectories[i] for i in indices]
    assert (joined == torch.cat(episodes)).all()
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
    split = split_trajectories(joined[None])
    assert len(split) <= 8  # Equal neighbours are merged.


def test_parts_by_return_are_ordered_and_complete(recording: Any) -> None:
    trajectories = recording.dataset.trajectories
    low, middle, high = trajectories.split_by_return()
    assert len(low) + len(middle) + len(high) == len(trajectories)
    assert min(map(len, (low, middle, high))) > 0
    assert low.returns.max() < middle.returns.min()
    assert middle.returns.max() < high.returns.min()
    best = trajectories.split_by_return([0.9], group="prey")[1]
    assert 0 < len(best) < len(trajectories) / 2
    prey = [sum(e.returns["prey"]) for e in trajectories.episodes]
    best_returns = [sum(e.returns["prey"]) for e in best.episodes]
    assert sorted(prey)[-len(best) :] == sorted(best_returns)
    reward = sum(float(t["next", "prey", "reward"].sum()) for t in best)
    assert reward == pytest.approx(sum(best_returns))
    with pytest.raises(KeyError, match="no group 'wolf'; expected hunter, prey"):
        trajectories.split_by_return(group="wolf")
    with pytest.raises(ValueError, match="ascend between 0 and 1"):
        trajectories.split_by_return([0.5, 0.5])


def test_equal_returns_go_into_one_part(recording: Any) -> None:
    trajectories = recording.dataset.trajectories
    median = float(np.median(trajectories.returns))
    at_median = trajectories.filter(lambda e: e.team_return == median)
    assert sorted(map(len, at_median.split_by_return([0.5]))) == [0, len(at_median)]
    assert [len(p) for p in at_median[:0].split_by_return()] == [0, 0, 0]
    tied = trajectories._take(np.zeros(10, np.int64))
    words = r"\[0, 10\] episodes, .* about \[8, 2\]: 10 of 10 episodes have the return"
    with pytest.warns(UserWarning, match=words):
        groups = tied.split_by_return([0.8])
    assert [len(group) for group in groups] == [0, 10]


def test_a_selection_has_only_its_own_frames(recording: Any) -> None:
    trajectories = recording.dataset.trajectories
    short = trajectories.filter(lambda e: e.length <= 12)
    assert 0 < len(short) < len(trajectories)
    assert short.lengths.max() <= 12
    assert len(short.transitions) == short.lengths.sum()
    expected = torch.cat(list(short))
    assert (short.transitions[:] == expected).all()
    assert [len(t) for t in short[2:5]] == short.lengths[2:5].tolist()
    assert repr(short).endswith(f"{len(short)} episodes, {short.lengths.sum()} frames)")


def test_a_selection_has_only_its_own_keys(recording: Any) -> None:
    trajectories = recording.dataset.trajectories
    selection = trajectories.select(("hunter", "observation"), "state", "next")
    actual = selection[0]
    assert set(actual.keys()) == {"hunter", "state", "next"}
    assert set(actual["hunter"].keys()) == {"observation"}
    assert (actual == trajectories[0].select(*actual.keys(True, True))).all()
    with pytest.raises(KeyError, match="There is no key hunter/position"):
        trajectories.select(("hunter", "position"))


def test_what_a_dataset_returns_can_be_saved(recording: Any, tmp_path: Path) -> None:
    frames = recording.dataset.transitions[:4]
    with pytest.raises(KeyError, match="What a step returns is under 'next'"):
        frames["hunter", "reward"]
    frames.memmap(tmp_path / "frames")
    assert (TensorDict.load_memmap(tmp_path / "frames") == frames).all()


def test_tensors_that_were_read_are_independent_copies(recording: Any) -> None:
    dataset = recording.dataset
    before = dataset.trajectories[0].clone()
    dataset.trajectories[0].zero_()
    dataset.transitions[:20].zero_()
    assert (dataset.trajectories[0] == before).all()


def test_no_files_stay_open(recording: Any) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():  # Only Linux lists open files here.
        folder = Path("/dev/fd")
    dataset = recording.dataset
    before = len(list(folder.iterdir()))
    views = [*dataset.trajectories, dataset.transitions[:], dataset.view]
    assert len(list(folder.iterdir())) <= before
    assert len(views) > 20
