"""Every way of reading a dataset returns the collected data.

Frames, episodes, pieces of episodes, transitions over several frames, and all of them
normalised. Loaders yield every item once per epoch, seeded and resumable.
"""

import pickle
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from storage_streams import Stream, write
from tensordict import TensorDict
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler
from torch.utils.data._utils import collate

from marl_collect import open_dataset
from marl_collect.storage import Dataset

GAMMA = 0.9
MASK = ("collector", "mask")


@pytest.mark.parametrize("kind", ["transitions", "trajectories"])
def test_samples_are_uniform_and_reproducible(dataset: Any, kind: str) -> None:
    items = getattr(dataset, kind)
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    indices = torch.randint(len(items), (50,), generator=generators[0])
    sample = items.sample(50, generator=generators[1])
    assert (sample == items.__getitems__(indices.tolist())).all()
    wrong: Any
    for wrong in (-1, "3", 1.5, True):
        with pytest.raises((TypeError, ValueError), match="n must be an integer"):
            items.sample(wrong)


def test_frames_are_read_in_any_order_as_copies(recording: Any, tmp_path: Path) -> None:
    transitions, flat = recording.dataset.transitions, recording.frames
    assert len(transitions) == len(flat) == 600
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(600, dtype=torch.bool)
    mask[[3, 598]] = True
    mixed = [torch.tensor(3), np.int32(4), -600, 5, 5]
    slices = slice(None), slice(10, 400, 7)
    for index in (*slices, -1, order, mask, mask.tolist(), mixed):
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
    assert len(pickled) < 20_000 < transitions.nbytes
    assert (pickle.loads(pickled)[:] == flat).all()
    transitions[:4].memmap(tmp_path / "frames")
    assert (TensorDict.load_memmap(tmp_path / "frames") == flat[:4]).all()
    for number in (600, -601, [0, 600]):
        with pytest.raises(IndexError, match="Frame .* is out of range: there are 600"):
            transitions[number]
    for wrong in (mask[:599], True, 1.5, torch.ones(2), [[1, 2]], mask[:, None], None):
        with pytest.raises(TypeError, match="a list of integers, or 600 booleans"):
            transitions[wrong]


def test_parts_by_return_are_ordered_and_complete(dataset: Any) -> None:
    episodes = dataset.trajectories
    parts = episodes.split_by_return()
    assert sum(map(len, parts)) == len(episodes)
    for below, above in pairwise(parts):
        assert below.returns.max() < above.returns.min()
    tied = episodes._take(np.zeros(10, np.int64))
    assert [len(part) for part in tied[:0].split_by_return()] == [0, 0, 0]
    assert sorted(map(len, tied[:1].split_by_return(np.array([0.5])))) == [0, 1]
    assert [len(part) for part in tied.split_by_return([0.8])] == [0, 10]
    wrong: Any
    for wrong in ([0.5, 0.5], [0], [0.5, 0.2], [1.0], 0.5, "1", [None]):
        with pytest.raises((TypeError, ValueError), match="quantiles must .*ascend"):
            episodes.split_by_return(wrong)


def test_a_selection_has_only_its_frames_and_keys(dataset: Any) -> None:
    episodes = dataset.trajectories
    short = episodes.filter(lambda e: e.length <= 12)
    assert 0 < len(short) < len(episodes)
    assert short.lengths.max() <= 12
    assert (short.transitions[:] == torch.cat(list(short))).all()
    assert [len(t) for t in short[2:5]] == short.lengths[2:5].tolist()
    assert repr(short).endswith(f"{len(short)} episodes, {short.lengths.sum()} frames)")
    selection = episodes.select(("hunter", "observation"), "state", "next")[0]
    assert set(selection.keys()) == {"hunter", "state", "next"}
    assert set(selection["hunter"].keys()) == {"observation"}
    assert selection.names == ["time"]
    assert selection["hunter"].batch_size == (len(selection), 2)
    assert (selection == episodes[0].select(*selection.keys(True, True))).all()
    for index in ((n := len(episodes)), -n - 1):
        with pytest.raises(IndexError, match=f"Episode {index} is out of .* are {n}"):
            episodes[index]
    with pytest.raises(KeyError, match="There is no key hunter/position"):
        episodes.select(("hunter", "position"))


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("burn_in", [0, 3, 50])
def test_pieces_overlap_and_have_frames_in_front(
    dataset: Any, stride: int, burn_in: int
) -> None:
    episodes, length = dataset.trajectories[:12], 4
    sequences = episodes.sequences(length, stride=stride, burn_in=burn_in)
    remaining = iter(sequences)
    for episode in episodes:
        end = 0
        for begin in range(0, len(episode), stride):
            if end == len(episode):
                break
            end = min(begin + length, len(episode))
            sequence = next(remaining)
            padding = max(0, burn_in - begin)
            expected = episode[begin - burn_in + padding : end]
            columns = torch.arange(burn_in + length)
            mask = (padding <= columns) & (columns < padding + len(expected))
            assert torch.equal(sequence[MASK], mask)
            assert (sequence[mask].exclude(MASK) == expected).all()
            assert not sequence[~mask]["hunter", "observation"].any()
        assert end == len(episode)
    assert next(remaining, None) is None
    assert (sequences[-1] == sequences[len(sequences) - 1]).all()
    with pytest.raises(IndexError, match="is out of range"):
        sequences[len(sequences)]


@pytest.mark.parametrize("n", [1, 3])
def test_n_step_transitions_equal_a_loop_over_episodes(dataset: Any, n: int) -> None:
    trajectories = dataset.trajectories
    steps = trajectories.n_step(n, gamma=GAMMA)
    assert len(steps) == trajectories.lengths.sum()
    items = iter(steps.__getitems__(list(range(len(steps)))))
    for episode in trajectories:
        after = episode["next"]
        for first in range(len(episode)):
            last = min(first + n, len(episode)) - 1
            count = last - first + 1
            item = next(items)
            assert item["steps_to_next_obs"].tolist() == [count]
            assert item["gamma"].item() == pytest.approx(GAMMA**count)
            assert (item["prey", "action"] == episode["prey", "action"][first]).all()
            assert (item["state"] == episode["state"][first]).all()
            assert (item["next", "state"] == after["state"][last]).all()
            assert (item["next", "done"] == after["done"][last]).all()
            for group in ("hunter", "prey"):
                rewards = after[group, "reward"][first : last + 1].double()
                total: Any = sum(GAMMA**i * r for i, r in enumerate(rewards))
                torch.testing.assert_close(item["next", group, "reward"], total.float())
    with pytest.raises(IndexError, match="out of range"):
        steps.__getitems__([len(steps)])


def test_n_step_transitions_do_not_overwrite_a_group(tmp_path: Path) -> None:
    batches = Stream().batches()
    for batch in batches:
        batch["gamma", "observation"] = batch["frame"]
    write(tmp_path, batches)
    trajectories = open_dataset(tmp_path).trajectories
    with pytest.raises(ValueError, match=r"has keys under \['gamma'\]"):
        trajectories.n_step(2)
    some = trajectories.select("g", ("next", "g")).n_step(2)
    assert some[0]["gamma"].shape == (1,)


def tags(batch: Any) -> list[Any]:
    """Identify valid frames."""
    flat = batch.reshape(-1)
    mask = batch.get(("collector", "mask"), None)
    if mask is not None:
        flat = flat[mask.reshape(-1)]
    ids = flat["collector", "traj_ids"].tolist()
    values = flat["hunter", "observation"].flatten(1).sum(1)
    return list(zip(ids, values.tolist(), strict=True))


def all_tags(batches: Any) -> list[Any]:
    return [tags(batch) for batch in batches]


KINDS = {
    "transitions": lambda dataset: dataset.transitions,
    "trajectories": lambda dataset: dataset.trajectories,
    "sequences": lambda dataset: dataset.trajectories.sequences(3),
    "n-steps": lambda dataset: dataset.trajectories.n_step(2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_item_once(dataset: Dataset, kind: str) -> None:
    source = KINDS[kind](dataset)
    loader = source.loader(batch_size=16, seed=1)
    epochs = [all_tags(loader) for _ in range(2)]
    assert len(epochs[0]) == len(loader) > 1
    flat = [sorted(chain(*epoch)) for epoch in epochs]
    single = kind == "transitions"
    frames = dataset.transitions if single else dataset.trajectories.transitions
    assert flat[0] == flat[1] == sorted(tags(frames[:]))
    assert epochs[0] != epochs[1]
    assert all_tags(source.loader(batch_size=16, seed=1)) == epochs[0]


def test_orders_follow_from_the_seed_as_documented(dataset: Dataset) -> None:
    """The numbers are those of docs/architecture.md ("Seeds")."""
    key, episodes = ("collector", "traj_ids"), dataset.trajectories[:10]
    numbers = episodes.first(key).tolist()
    loader = episodes.loader(batch_size=10, seed=5)
    orders = []
    for _ in range(2):
        (batch,) = loader
        orders.append([numbers.index(number) for number in batch[key][:, 0].tolist()])
    assert orders == [[8, 2, 3, 9, 7, 6, 4, 1, 5, 0], [9, 3, 0, 4, 5, 8, 6, 2, 7, 1]]


@pytest.mark.processes
@pytest.mark.forks
@pytest.mark.parametrize("workers", [0, 2])
def test_loops_are_independent_and_workers_change_nothing(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    # Processes of other methods, such as TorchRL's default, run the script again.
    monkeypatch.setattr("torch.multiprocessing.Process", None)
    monkeypatch.setattr("multiprocessing.context.SpawnContext.Process", None)
    before = {child.pid for child in psutil.Process().children()}
    state = torch.get_rng_state()
    alone = dataset.transitions.loader(batch_size=16, seed=2)
    epochs = [all_tags(alone) for _ in range(3)]
    loader = dataset.transitions.loader(batch_size=16, seed=2, workers=workers)
    assert all_tags(b for _, b in zip(range(2), loader, strict=False)) == epochs[0][:2]
    pairs = map(all_tags, zip(loader, loader, strict=True))
    assert [*map(list, zip(*pairs, strict=True))] == epochs[1:]
    older, newer = iter(alone), iter(alone)
    assert len([next(newer), *older]) == len(alone) + 1
    assert alone.state_dict()["batches"] == 1  # Of the latest loop.
    assert torch.equal(torch.get_rng_state(), state)
    # None is left, also of the loop that was left.
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.accelerator
@pytest.mark.forks
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_in_pinned_memory_for_a_gpu(dataset: Dataset, workers: int) -> None:
    # The processes are forked while this one uses the GPU.
    torch.zeros(1, device="cuda")
    pinned = dataset.transitions.loader(batch_size=8, seed=0, workers=workers)
    plain = dataset.transitions.loader(batch_size=8, seed=0)
    for batch, expected in zip(pinned, plain, strict=True):
        leaves = batch.values(include_nested=True, leaves_only=True)
        assert all(leaf.is_pinned() for leaf in leaves)
        assert (batch.to("cuda", non_blocking=True).cpu() == expected).all()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_an_epoch_as_in_torch(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, drop_last: bool, shuffle: bool
) -> None:
    """Ranks are those of torchrun, or given."""
    world, episodes = 3, dataset.trajectories[:10]
    ids = episodes.first(("collector", "traj_ids")).tolist()
    assert len(ids) % world
    items: list[int] = []
    options: Any = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
    monkeypatch.setenv("WORLD_SIZE", str(world))
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        loader = episodes.loader(1, **options)
        items += (own := [int(b["collector", "traj_ids"][0, 0]) for b in loader])
        sampler: Any = DistributedSampler(
            episodes, world, rank, shuffle=False, drop_last=drop_last
        )
        assert len(loader) == len(own) == len(sampler)
        assert shuffle or own == [ids[i] for i in sampler]
    alone = episodes.loader(4, rank=0, world_size=1, **options)
    assert list(map(len, alone)) == [4, 4] + [2] * (not drop_last)
    if drop_last:
        assert len(set(items)) == len(items) == len(ids) // world * world
    else:
        assert set(items) == set(ids)
    with pytest.raises(ValueError, match="give all of them one seed"):
        episodes.loader(10)


@pytest.mark.parametrize("count", [5, 12, 20])  # An epoch has 12 batches.
def test_a_loader_resumes_with_the_next_batch(dataset: Dataset, count: int) -> None:
    alone = dataset.transitions.loader(batch_size=50, seed=3)
    expected = [tags(batch) for _ in range(3) for batch in alone]
    first = dataset.transitions.loader(batch_size=50, seed=3)
    batches = chain.from_iterable(iter(first) for _ in range(3))
    actual = [tags(batch) for _, batch in zip(range(count), batches, strict=False)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    # Otherwise, a whole epoch follows a loop that was left.
    epoch = -(-count // len(first))
    assert all_tags(first) == expected[epoch * len(first) :][: len(first)]
    assert first.epoch == epoch + 1
    for second in (first, dataset.transitions.loader(batch_size=50, seed=99)):
        second.load_state_dict(state)
        both = actual + [tags(batch) for _ in range(2) for batch in second]
        assert both == expected[: (count // len(first) + 2) * len(first)]
    others: tuple[dict[str, Any], ...]
    others = {"batch_size": 9}, {"shuffle": False}, {"drop_last": True}
    for option in others:
        other = dataset.transitions.loader(**({"batch_size": 50} | option))
        with pytest.raises(ValueError, match=f"with {next(iter(option))} .*same arg"):
            other.load_state_dict(state)


@pytest.mark.processes
@pytest.mark.forks
@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_data_loader_reads_whole_batches(dataset: Any, workers: int) -> None:
    # TorchRL makes spawned workers the default, and each takes seconds to start.
    options: Any = {"num_workers": workers}
    options["multiprocessing_context"] = "fork" if workers else None
    frames, episodes = dataset.transitions, dataset.trajectories
    for items in (frames, episodes, episodes.sequences(4), episodes.n_step(2)):
        loader: Any = DataLoader(items, 3, collate_fn=items.collate, **options)
        expected = items.__getitems__([0, 1, 2])
        assert (next(iter(loader)) == expected).all()
    # torch reads the items of a ConcatDataset one by one.
    loader = DataLoader(ConcatDataset([frames, frames]), 16, collate_fn=frames.collate)
    assert tags(next(iter(loader))) == tags(frames[:16])
    kinds = [k for k in collate.default_collate_fn_map if isinstance(k, type)]
    assert not any(issubclass(kind, TensorDict) for kind in kinds)


REFUSALS = {
    "batch_size must be an integer of at least 1": "transitions.loader(0)",
    "workers must be an integer of at least 0": "transitions.loader(2, workers=-1)",
    "drop_last leaves no batch of 999 ": "transitions.loader(999, drop_last=True)",
    "rank is 2 and world_size is 2": "transitions.loader(1, rank=2, world_size=2)",
    "pass both, or neither": "transitions.loader(1, rank=1, seed=0)",
    "length must be .* at least 1, but is 0": "trajectories.sequences(0)",
    "at most 3, but is 4. Every": "trajectories.sequences(3, stride=4)",
    "at least 1, but is 0. Every": "trajectories.sequences(3, stride=0)",
    "burn_in .*1.5": "trajectories.sequences(3, burn_in=1.5)",
    "burn_in .* at least 0": "trajectories.sequences(3, burn_in=-1)",
    "n must be an integer of at least 1, but is 0": "trajectories.n_step(0)",
    "gamma must be .* at most 1": "trajectories.n_step(2, gamma=1.5)",
    "No reward is selected": "trajectories.select('collector').n_step(2)",
    "There is nothing to load": "trajectories[:0].loader(1)",
    r"nothing to sample in Trajectories\(": "trajectories[:0].sample(1)",
    r"nothing to sample in Transitions\(": "trajectories[:0].transitions.sample(1)",
    "no key nothing": "transitions.moments('nothing')",
    'key "frame" not found': "transitions.normalised({('frame',): None})",
    "There are no complete episodes in": "trajectories[:0].stats()",
    "There are no frames in": "trajectories[:0].transitions.moments('state')",
}


@pytest.mark.parametrize("message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(dataset: Dataset, message: str) -> None:
    with pytest.raises((TypeError, ValueError, KeyError), match=message):
        eval(f"dataset.{REFUSALS[message]}")
