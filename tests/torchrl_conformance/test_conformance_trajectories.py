"""Splitting batches into trajectories: results are those of TorchRL."""

from typing import Any

import pytest
import torch
from conformance_tools import IDS, check_same
from tensordict import TensorDict


def batch_of(rows: Any, **entries: Any) -> TensorDict:
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


def moved(batch: TensorDict, key: Any, new_key: Any) -> TensorDict:
    batch[new_key] = batch.pop(key)
    return batch


ROWS = [[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]]
FLAGGED = batch_of(ROWS).exclude("collector")
FLAGGED["next", "done"][:, -1] = False  # Both rows are cut.


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (batch_of(ROWS), {}),
        (batch_of([[0, 0, 0], [1, 1, 1]]), {}),
        (batch_of([0, 0, 0]), {}),
        (batch_of([[[0, 1, 1]], [[2, 2, 3]]]), {}),
        (FLAGGED, {}),
        (moved(batch_of(ROWS), IDS, ("there", "traj_ids")), {"prefix": "there"}),
        (moved(batch_of(ROWS), IDS, "episode"), {"trajectory_key": "episode"}),
        (
            moved(FLAGGED.clone(), ("next", "done"), ("next", "over")),
            {"done_key": "over"},
        ),
        (
            batch_of(
                [[0, 0, 1]],
                flag=torch.ones(1, 3, dtype=torch.bool),
                byte=torch.ones(1, 3, dtype=torch.uint8),
                double=torch.ones(1, 3, dtype=torch.float64),
            ).refine_names(..., "time"),
            {},
        ),
    ],
)
def test_trajectories_are_the_same(batch: Any, options: Any) -> None:
    copy = batch.clone()

    def split(implementation: Any) -> list[Any]:
        # TorchRL adds ids that it makes of the flags.
        return [implementation.split_trajectories(batch, **options).exclude("traj_ids")]

    check_same(split)
    assert set(batch.keys(True)) == set(copy.keys(True))
    assert (batch == copy).all()


def test_trajectories_may_be_nested_tensors(implementation: Any) -> None:
    split = implementation.split_trajectories(batch_of(ROWS), as_nested=True)
    assert split.batch_size[0] == 4
    trajectories = [row.tolist() for row in split["number"].unbind()]
    assert trajectories == [[1, 2], [3, 4, 5], [6, 7, 8, 9], [10]]


def test_gradients_flow_through(implementation: Any) -> None:
    value = torch.ones(1, 3, requires_grad=True)
    split = implementation.split_trajectories(batch_of([[0, 0, 1]], value=value))
    (split["value"] * 2).sum().backward()
    assert value.grad.tolist() == [[2, 2, 2]]
