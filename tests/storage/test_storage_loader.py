"""Loaders yield every item once per epoch, seeded and resumable."""

import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.scripts import run_python
from tensordict import TensorDict
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler
from torch.utils.data._utils import collate

from marl_collect.storage import Dataset


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
    "dataset": lambda dataset: dataset,
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
    single = kind in ("dataset", "transitions")
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
    dataset: Dataset, workers: int
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    alone = dataset.loader(batch_size=16, seed=2)
    epochs = [all_tags(alone) for _ in range(3)]
    loader = dataset.loader(batch_size=16, seed=2, workers=workers)
    assert all_tags(b for _, b in zip(range(2), loader, strict=False)) == epochs[0][:2]
    pairs = map(all_tags, zip(loader, loader, strict=True))
    assert [*map(list, zip(*pairs, strict=True))] == epochs[1:]
    older, newer = iter(alone), iter(alone)
    assert len([next(newer), *older]) == len(alone) + 1
    assert alone.state_dict()["batches"] == 1  # Of the latest loop.
    # None is left, also of the loop that was left.
    assert {child.pid for child in psutil.Process().children()} == before


READ = """
import multiprocessing
import sys

from marl_collect import open_dataset

multiprocessing.set_start_method("spawn", force=True)  # As TorchRL's import does.
loader = open_dataset(sys.argv[1]).loader(batch_size=16, seed=2, workers=2)
print(sum(batch.numel() for batch in loader))
"""


@pytest.mark.processes
def test_worker_processes_need_no_main_guard(dataset: Dataset, tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(READ)
    process = run_python(script, dataset.name)
    assert process.stdout == f"{len(dataset.transitions)}\n", process.stderr


@pytest.mark.accelerator
@pytest.mark.forks
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_in_pinned_memory_for_a_gpu(dataset: Dataset, workers: int) -> None:
    # The processes are forked while this one uses the GPU.
    torch.zeros(1, device="cuda")
    pinned = dataset.loader(batch_size=8, seed=0, workers=workers)
    plain = dataset.loader(batch_size=8, seed=0)
    for batch, expected in zip(pinned, plain, strict=True):
        leaves = batch.values(include_nested=True, leaves_only=True)
        assert all(leaf.is_pinned() for leaf in leaves)
        assert (batch.to("cuda", non_blocking=True).cpu() == expected).all()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_an_epoch_as_in_torch(
    dataset: Any, drop_last: bool, shuffle: bool
) -> None:
    world, episodes = 3, dataset.trajectories[:10]
    ids = episodes.first(("collector", "traj_ids")).tolist()
    assert len(ids) % world
    items: list[int] = []
    options: Any = {"world_size": world, "seed": 5, "drop_last": drop_last}
    for rank in range(world):
        loader = episodes.loader(1, rank=rank, shuffle=shuffle, **options)
        items += (own := [int(b["collector", "traj_ids"][0, 0]) for b in loader])
        sampler: Any = DistributedSampler(
            episodes, world, rank, shuffle=False, drop_last=drop_last
        )
        assert len(loader) == len(own) == len(sampler)
        assert shuffle or own == [ids[i] for i in sampler]
    if drop_last:
        assert len(set(items)) == len(items) == len(ids) // world * world
        sizes = [len(batch) for batch in episodes.loader(4, drop_last=True)]
        assert sizes == [4] * (len(ids) // 4)
    else:
        assert set(items) == set(ids)


def test_ranks_are_those_of_torchrun(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        told = dataset.loader(10, seed=0, rank=rank, world_size=2)
        assert all_tags(dataset.loader(10, seed=0)) == all_tags(told)
    everything = dataset.loader(10, seed=0, rank=0, world_size=1)
    assert sum(map(len, everything)) == len(dataset)
    with pytest.raises(ValueError, match="give all of them one seed"):
        dataset.loader(10)


@pytest.mark.parametrize("count", [5, 12, 20])  # An epoch has 12 batches.
def test_a_loader_resumes_with_the_next_batch(dataset: Dataset, count: int) -> None:
    alone = dataset.loader(batch_size=50, seed=3)
    expected = [tags(batch) for _ in range(3) for batch in alone]
    first = dataset.loader(batch_size=50, seed=3)
    batches = chain.from_iterable(iter(first) for _ in range(3))
    actual = [tags(batch) for _, batch in zip(range(count), batches, strict=False)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    # Otherwise, a whole epoch follows a loop that was left.
    epoch = -(-count // len(first))
    assert all_tags(first) == expected[epoch * len(first) :][: len(first)]
    assert first.epoch == epoch + 1
    for second in (first, dataset.loader(batch_size=50, seed=99)):
        second.load_state_dict(state)
        both = actual + [tags(batch) for _ in range(2) for batch in second]
        assert both == expected[: (count // len(first) + 2) * len(first)]
    others: tuple[dict[str, Any], ...]
    others = {"batch_size": 9}, {"shuffle": False}, {"drop_last": True}
    for option in others:
        other = dataset.loader(**({"batch_size": 50} | option))
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
    "batch_size must be an integer of at least 1": lambda d: d.loader(0),
    "workers must be an integer of at least 0": lambda d: d.loader(2, workers=-1),
    "drop_last leaves no batch of 999 ": lambda d: d.loader(999, drop_last=True),
    "give all of them one seed": lambda d: d.loader(1, rank=0, world_size=2),
    "rank is 2 and world_size is 2": lambda d: d.loader(1, rank=2, world_size=2),
    "pass both, or neither": lambda d: d.loader(1, rank=1, seed=0),
    "length must be .* at least 1, but is 0": lambda d: d.trajectories.sequences(0),
    "length must be an integer .*2.5": lambda d: d.trajectories.sequences(2.5),
    "length must be an integer .*'3'": lambda d: d.trajectories.sequences("3"),
    "at most 3, but is 4. Every": lambda d: d.trajectories.sequences(3, stride=4),
    "at least 1, but is 0. Every": lambda d: d.trajectories.sequences(3, stride=0),
    "burn_in .*1.5": lambda d: d.trajectories.sequences(3, burn_in=1.5),
    "burn_in .* at least 0": lambda d: d.trajectories.sequences(3, burn_in=-1),
    "n must be an integer of at least 1, but is 0": lambda d: d.trajectories.n_step(0),
    "n must be an integer .*1.5": lambda d: d.trajectories.n_step(1.5),
    "gamma must be .* at most 1": lambda d: d.trajectories.n_step(2, gamma=1.5),
    "No reward is selected": lambda d: d.trajectories.select("collector").n_step(2),
    "There is nothing to load": lambda d: d.trajectories[:0].loader(1),
    "no episodes to sample": lambda d: d.trajectories[:0].sample(1),
    "no frames to sample": lambda d: d.trajectories[:0].transitions.sample(1),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(dataset: Dataset, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSALS[message](dataset)
