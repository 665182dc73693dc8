"""Every way of reading a dataset returns the collected data."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector, open_dataset, split_trajectories
from marl_collect.storage import DatasetDescription, Writer


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dataset of two runs whose episodes cross batches, and their frames."""
    path = tmp_path_factory.mktemp("data") / "d"
    truth = []
    for seed in (0, 1):
        collector = Collector(
            [lambda: CountingEnv(state=True)] * 3,
            frames_per_batch=30,
            total_frames=300,
            seed=seed,
        )
        description = DatasetDescription("counting", collector.description)
        with Writer(path, description) as writer:
            batches = [batch.clone() for batch in collector]
            for batch in batches:
                writer.add(batch)
        truth.append(torch.cat(batches, 1))
    return path, truth


def whole(truth: list[TensorDict]) -> dict[tuple[int, int], TensorDict]:
    """Complete episodes by run and trajectory, cut out of the collected frames."""
    episodes = {}
    for run, rows in enumerate(truth):
        for row in rows.unbind(0):
            for number in row["collector", "traj_ids"].unique().tolist():
                episode = row[row["collector", "traj_ids"] == number]
                if episode["next", "done"][-1]:
                    episodes[run, number] = episode
    return episodes


def test_every_complete_episode_equals_the_collected_one(recording: Any) -> None:
    path, truth = recording
    dataset = open_dataset(path)
    expected = whole(truth)
    assert len(dataset.trajectories) == len(expected) > 20
    runs = np.repeat([0, 1], [sum(k[0] == r for k in expected) for r in (0, 1)])
    ends = zip(runs, dataset.trajectories, dataset.trajectories.episodes, strict=True)
    for run, episode, info in ends:
        number = int(episode["collector", "traj_ids"][0])
        expected_episode = expected.pop((int(run), number))
        assert (episode == expected_episode).all()
        assert episode.batch_size == expected_episode.batch_size
        assert episode["hunter"].batch_size == expected_episode["hunter"].batch_size
        assert episode.names == ["time"]
        assert info.length == len(expected_episode)
        rewards = sum(
            expected_episode["next", g, "reward"].sum() for g in ("hunter", "prey")
        )
        assert info.team_return == pytest.approx(float(rewards))
    assert not expected
    assert max(dataset.trajectories.lengths) > 10  # Frames of a batch's row.


def test_frames_are_stored_in_order_and_read_in_any_order(recording: Any) -> None:
    path, truth = recording
    transitions = open_dataset(path).transitions
    batches = [piece for run in truth for piece in run.split(10, 1)]
    flat = torch.cat([batch.reshape(-1) for batch in batches])
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


def test_frames_are_indexed_by_integers_and_booleans_only(recording: Any) -> None:
    transitions = open_dataset(recording[0]).transitions
    mask = torch.zeros(600, dtype=torch.bool)
    mask[[3, 598]] = True
    for mask_form in (mask, mask.numpy(), mask.tolist()):
        assert (transitions[mask_form] == transitions[[3, 598]]).all()
    assert transitions[[]].shape == transitions[~mask & mask].shape == (0,)
    assert (transitions[[torch.tensor(3), np.int32(4)]] == transitions[3:5]).all()
    for index in (mask[:599], True, 1.5, torch.ones(2), [[1, 2]], mask[:, None], None):
        with pytest.raises(TypeError, match="a list of integers, or 600 booleans"):
            transitions[index]


def test_wrong_numbers_are_named(recording: Any, tmp_path: Path) -> None:
    dataset = open_dataset(recording[0])
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
        trajectories.split_by_return(0.5)  # type: ignore[arg-type]
    (tmp_path / "x.hdf5").touch()
    with pytest.raises(NotADirectoryError, match="is not a folder of a dataset"):
        open_dataset(tmp_path / "x.hdf5")


def test_samples_are_uniform_and_reproducible(recording: Any) -> None:
    path, truth = recording
    transitions = open_dataset(path).transitions.select(("collector", "traj_ids"))
    draw = transitions.sample(60_000, generator=torch.Generator().manual_seed(1))
    repeated = transitions.sample(60_000, generator=torch.Generator().manual_seed(1))
    assert (draw == repeated).all()
    ids, counts = draw["collector", "traj_ids"].unique(return_counts=True)
    flat = torch.cat([run.reshape(-1)["collector", "traj_ids"] for run in truth])
    unique_ids, expected = flat.unique(return_counts=True)
    assert torch.equal(ids, unique_ids)
    share = counts / 60_000 - expected / 600
    assert share.abs().max() < 0.006  # Five standard errors of the largest share.


def test_padded_and_concatenated_samples_have_whole_episodes(recording: Any) -> None:
    trajectories = open_dataset(recording[0]).trajectories
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
    trajectories = open_dataset(recording[0]).trajectories
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
    trajectories = open_dataset(recording[0]).trajectories
    median = float(np.median(trajectories.returns))
    at_median = trajectories.filter(lambda e: e.team_return == median)
    assert sorted(map(len, at_median.split_by_return([0.5]))) == [0, len(at_median)]
    assert [len(p) for p in at_median[:0].split_by_return()] == [0, 0, 0]


def test_a_part_that_is_far_from_its_share_is_a_warning(recording: Any) -> None:
    trajectories = open_dataset(recording[0]).trajectories
    tied = trajectories._take(np.zeros(10, np.int64))
    words = r"\[0, 10\] episodes, .* about \[8, 2\]: 10 of 10 episodes have the return"
    with pytest.warns(UserWarning, match=words):
        groups = tied.split_by_return([0.8])
    assert [len(group) for group in groups] == [0, 10]


def test_a_selection_has_only_its_own_frames(recording: Any) -> None:
    trajectories = open_dataset(recording[0]).trajectories
    short = trajectories.filter(lambda e: e.length <= 12)
    assert 0 < len(short) < len(trajectories)
    assert short.lengths.max() <= 12
    assert len(short.transitions) == short.lengths.sum()
    expected = torch.cat(list(short))
    assert (short.transitions[:] == expected).all()
    assert [len(t) for t in short[2:5]] == short.lengths[2:5].tolist()
    assert repr(short).endswith(f"{len(short)} episodes, {short.lengths.sum()} frames)")


def test_a_selection_has_only_its_own_keys(recording: Any) -> None:
    trajectories = open_dataset(recording[0]).trajectories
    selection = trajectories.select(("hunter", "observation"), "state", "next")
    actual = selection[0]
    assert set(actual.keys()) == {"hunter", "state", "next"}
    assert set(actual["hunter"].keys()) == {"observation"}
    assert (actual == trajectories[0].select(*actual.keys(True, True))).all()
    with pytest.raises(KeyError, match="There is no key hunter/position"):
        trajectories.select(("hunter", "position"))


def test_what_a_dataset_returns_can_be_saved(recording: Any, tmp_path: Path) -> None:
    frames = open_dataset(recording[0]).transitions[:4]
    with pytest.raises(KeyError, match="What a step returns is under 'next'"):
        frames["hunter", "reward"]
    frames.memmap(tmp_path / "frames")
    assert (TensorDict.load_memmap(tmp_path / "frames") == frames).all()


def test_sampling_from_nothing_is_an_error(tmp_path: Path) -> None:
    collector = Collector(CountingEnv, frames_per_batch=2, total_frames=2)
    description = DatasetDescription("counting", collector.description)
    with Writer(tmp_path / "d", description) as writer:
        writer.add(collector.next())
    dataset = open_dataset(tmp_path / "d")
    assert len(dataset.transitions) == 2
    with pytest.raises(ValueError, match="no episodes to sample"):
        dataset.trajectories.sample(1)
    with pytest.raises(ValueError, match="no frames to sample"):
        dataset.trajectories.transitions.sample(1)
    with pytest.raises(ValueError, match="form must be"):
        dataset.trajectories.sample(1, form="ragged")  # type: ignore[arg-type]


def test_tensors_that_were_read_are_independent_copies(recording: Any) -> None:
    dataset = open_dataset(recording[0])
    before = dataset.trajectories[0].clone()
    dataset.trajectories[0].zero_()
    dataset.transitions[:20].zero_()
    assert (dataset.trajectories[0] == before).all()


def test_no_files_stay_open(recording: Any) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():  # Only Linux lists open files here.
        folder = Path("/dev/fd")
    dataset = open_dataset(recording[0])
    before = len(list(folder.iterdir()))
    views = [*dataset.trajectories, dataset.transitions[:], dataset.view]
    assert len(list(folder.iterdir())) <= before
    assert len(views) > 20


def test_a_data_loader_reads_whole_batches_also_in_processes(recording: Any) -> None:
    transitions = open_dataset(recording[0]).transitions
    transitions[:3]  # The maps must not prevent pickling.
    assert (pickle.loads(pickle.dumps(transitions))[:] == transitions[:]).all()
    items: Any = transitions
    loader: Any = DataLoader(items, batch_size=128, collate_fn=lambda batch: batch)
    sizes = [batch.shape for batch in loader]
    assert sizes == [(128,)] * 4 + [(88,)]


def test_invalid_frames_are_not_included(tmp_path: Path) -> None:
    collector = MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=[10, 7], total_frames=170, seed=0
    )
    description = DatasetDescription("counting", collector.description)
    with Writer(tmp_path / "d", description) as writer:
        for batch in collector:
            writer.add(batch)
    dataset = open_dataset(tmp_path / "d").transitions
    assert len(dataset) == 170
    truth = Collector([CountingEnv] * 2, frames_per_batch=200, seed=0).next()
    trajectories = open_dataset(tmp_path / "d").trajectories
    for episode in trajectories:
        number = episode["collector", "traj_ids"][0]
        episode_frames = truth[truth["collector", "traj_ids"] == number]
        assert (episode == episode_frames).all()
    n_ended = truth["next", "done"][0, :100].sum() + truth["next", "done"][1, :70].sum()
    assert len(trajectories) == n_ended > 10
