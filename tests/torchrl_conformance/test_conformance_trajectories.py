"""Splitting batches into trajectories."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

IDS = ("collector", "traj_ids")


def batch_of(rows: list[list[int]], **entries: Any) -> TensorDict:
    """Return a batch with these trajectory ids; ``number`` counts its frames from 1."""
    ids = torch.tensor(rows)
    number = torch.arange(1, ids.numel() + 1).view(ids.shape)
    ends = torch.ones_like(ids, dtype=torch.bool)
    ends[..., :-1] = ids[..., 1:] != ids[..., :-1]
    content: dict[Any, Any] = {
        IDS: ids,
        "number": number,
        ("a", "wide"): number[..., None, None].expand(*ids.shape, 2, 3).clone(),
        ("next", "done"): ends[..., None],
        **entries,
    }
    return TensorDict(content, ids.shape)


def test_rows_become_trajectories_padded_to_the_longest(implementation: Any) -> None:
    split = implementation.split_trajectories(
        batch_of([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]])
    )
    assert split.shape == (4, 4)
    assert split["number"].tolist() == [
        [1, 2, 0, 0],
        [3, 4, 5, 0],
        [6, 7, 8, 9],
        [10, 0, 0, 0],
    ]
    mask = split["collector", "mask"]
    assert mask.dtype == torch.bool
    assert torch.equal(mask, split["number"] > 0)
    assert split["a", "wide"].shape == (4, 4, 2, 3)
    assert not split["a", "wide"][~mask].any()
    assert split["a", "wide"][mask].all()


@pytest.mark.parametrize("rows", [[[0, 0, 0], [1, 1, 1]], [[0, 0, 0]]])
def test_whole_rows_are_returned_with_a_mask(
    implementation: Any, rows: list[list[int]]
) -> None:
    batch = batch_of(rows)
    # Of a single row, a dimension is added.
    split = implementation.split_trajectories(batch[0] if len(rows) == 1 else batch)
    assert split.shape == (len(rows), 3)
    assert split["collector", "mask"].all()


def test_further_batch_dimensions_are_flattened(implementation: Any) -> None:
    ids = torch.tensor([[[0, 1, 1]], [[2, 2, 3]]])
    done = torch.zeros(2, 1, 3, 1, dtype=torch.bool)
    batch = TensorDict({IDS: ids, ("next", "done"): done}, [2, 1, 3])
    split = implementation.split_trajectories(batch)
    assert split.shape == (4, 2)
    assert split[IDS][split["collector", "mask"]].tolist() == [0, 1, 1, 2, 2, 3]


def test_without_ids_the_flags_split(implementation: Any) -> None:
    done = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    number = torch.arange(1, 11).view(2, 5)
    batch = TensorDict({("next", "done"): done[..., None], "number": number}, [2, 5])
    split = implementation.split_trajectories(batch)
    assert split["number"].tolist() == [
        [1, 2, 0, 0, 0],
        [3, 4, 5, 0, 0],
        [6, 7, 8, 9, 10],
    ]
    assert split["mask"].sum() == 10


def test_a_prefix_names_the_place_of_the_ids(implementation: Any) -> None:
    batch = batch_of([[0, 0, 1]])
    batch["there", "traj_ids"] = batch.pop(IDS)
    split = implementation.split_trajectories(batch, prefix="there")
    assert split["there", "mask"].sum(-1).tolist() == [2, 1]


def test_a_key_names_the_ids(implementation: Any) -> None:
    batch = batch_of([[0, 0, 1]])
    batch["episode"] = batch.pop(IDS)
    split = implementation.split_trajectories(batch, trajectory_key="episode")
    assert split["number"].tolist() == [[1, 2], [3, 0]]
    assert split["mask"].sum(-1).tolist() == [2, 1]


def test_a_key_names_the_flags(implementation: Any) -> None:
    done = torch.tensor([[0, 1, 0]], dtype=torch.bool)[..., None]
    batch = TensorDict({("next", "over"): done, "number": torch.ones(1, 3)}, [1, 3])
    split = implementation.split_trajectories(batch, done_key="over")
    assert split["number"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float64])
def test_dtypes_are_kept_and_the_batch_is_not_changed(
    implementation: Any, dtype: Any
) -> None:
    batch = batch_of([[0, 0, 1]], entry=torch.ones(1, 3, dtype=dtype))
    batch = batch.refine_names(..., "time")
    keys, copy = set(batch.keys(True, True)), batch.clone()
    split = implementation.split_trajectories(batch)
    assert split.shape == (2, 2)
    assert split["entry"].dtype == dtype
    assert set(batch.keys(True, True)) == keys
    assert (batch == copy).all()


def test_trajectories_may_be_nested_tensors(implementation: Any) -> None:
    batch = batch_of([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]])
    split = implementation.split_trajectories(batch, as_nested=True)
    assert split.batch_size[0] == 4
    trajectories = [row.tolist() for row in split["number"].unbind()]
    assert trajectories == [[1, 2], [3, 4, 5], [6, 7, 8, 9], [10]]


def test_gradients_flow_through(implementation: Any) -> None:
    value = torch.ones(1, 3, requires_grad=True)
    split = implementation.split_trajectories(batch_of([[0, 0, 1]], value=value))
    (split["value"] * 2).sum().backward()
    assert value.grad.tolist() == [[2, 2, 2]]
