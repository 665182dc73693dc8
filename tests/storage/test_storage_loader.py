"""Loaders yield every item once per epoch, seeded and resumable."""

import pickle
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from marl_collect import Collector, open_dataset
from marl_collect.storage import Dataset, DatasetDescription, Writer
from marl_collect.testing.counting import CountingEnv


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("loader") / "d"
    collector = Collector(
        [CountingEnv] * 2, frames_per_batch=20, total_frames=100, seed=0
    )
    with Writer(path, DatasetDescription("c", collector.description)) as writer:
        for batch in collector:
            writer.add(batch)
    return open_dataset(path)


def tags(batch: Any) -> list[Any]:
    """Identify valid frames."""
    flat = batch.reshape(-1)
    mask = batch.get(("collector", "mask"), None)
    if mask is not None:
        flat = flat[mask.reshape(-1)]
    values = flat["hunter", "observation"].flatten(1).sum(1)
    return list(
        zip(flat["collector", "traj_ids"].tolist(), values.tolist(), strict=True)
    )


@pytest.mark.parametrize("of", ["transitions", "trajectories", "sequences"])
def test_an_epoch_has_every_item_once(dataset: Dataset, of: Any) -> None:
    length = 3 if of == "sequences" else None
    loader = dataset.loader(batch_size=4, of=of, length=length, seed=1)
    epochs = [[tags(batch) for batch in loader] for _ in range(2)]
    assert len(epochs[0]) == len(loader) > 1
    flat = [sorted(chain(*epoch)) for epoch in epochs]
    source = (
        dataset.transitions
        if of == "transitions"
        else (dataset.trajectories.transitions)
    )
    assert flat[0] == flat[1] == sorted(tags(source[:]))
    assert epochs[0] != epochs[1]
    again = dataset.loader(batch_size=4, of=of, length=length, seed=1)
    assert [tags(batch) for batch in again] == epochs[0]


def test_sequences_have_one_length_and_do_not_mix_episodes(dataset: Dataset) -> None:
    for batch in dataset.loader(batch_size=5, of="sequences", length=3, seed=0):
        assert batch.shape[1] == 3
        assert batch.names == [None, "time"]
        mask = batch["collector", "mask"]
        for piece, valid in zip(batch, mask, strict=True):
            ids = piece["collector", "traj_ids"][valid]
            assert len(ids)
            assert (ids == ids[0]).all()
            done = piece["next", "done"][valid][:-1]
            assert not done.any()


def test_worker_processes_give_the_same_batches(dataset: Dataset) -> None:
    here = [tags(b) for b in dataset.loader(batch_size=16, seed=2)]
    there = [tags(b) for b in dataset.loader(batch_size=16, seed=2, workers=2)]
    assert there == here


def test_a_loader_resumes_with_the_next_batch(dataset: Dataset) -> None:
    whole = dataset.loader(batch_size=8, seed=3)
    expected = [tags(batch) for _ in range(2) for batch in whole]
    first = dataset.loader(batch_size=8, seed=3)
    found = []
    for batch in first:
        found.append(tags(batch))
        if len(found) == 5:
            break
    second = dataset.loader(batch_size=8, seed=99)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    found += [tags(batch) for _ in range(2) for batch in second]
    assert found == expected
    with pytest.raises(ValueError, match="loader with batch_size 8"):
        dataset.loader(batch_size=9).load_state_dict(first.state_dict())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_data_loader_needs_no_collate_fn(dataset: Any, workers: int) -> None:
    loader: Any = DataLoader(dataset.transitions, batch_size=16, num_workers=workers)
    assert [*chain(*map(tags, loader))] == tags(dataset.transitions[:])
    loader = DataLoader(dataset.trajectories, batch_size=2, num_workers=workers)
    assert next(iter(loader)).shape[0] == 2
    loader = DataLoader(dataset.trajectories.sequences(4), batch_size=3)
    assert next(iter(loader)).shape == (3, 4)


def test_a_missing_key_says_where_rewards_are(dataset: Dataset) -> None:
    for sample in (
        dataset.trajectories.sample(4),
        dataset.transitions.sample(4),
        dataset.trajectories[0],
        torch.stack([dataset.transitions[0], dataset.transitions[1]]),
    ):
        with pytest.raises(KeyError, match=r"but \('next', 'hunter', 'reward'\)"):
            _ = sample["hunter", "reward"]
        with pytest.raises(KeyError):
            _ = sample["hunter", "nothing"]
        assert sample["next", "hunter", "reward"].dtype is torch.float32
    copy = pickle.loads(pickle.dumps(dataset.transitions[:3]))
    assert (copy == dataset.transitions[:3]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 2, "workers": -1}, "workers must be at least 0"),
        ({"batch_size": 2, "of": "frames"}, "must be one of transitions"),
        ({"batch_size": 2, "of": "sequences"}, "needs a length"),
        (
            {"batch_size": 2, "of": "sequences", "length": 0},
            "length must be at least 1",
        ),
        ({"batch_size": 2, "length": 3}, "the others have none"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    dataset: Dataset, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataset.loader(**arguments)
