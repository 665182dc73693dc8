"""The rows of a TensorDict."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from marl_collect.buffers.trajectories import split_trajectories
from marl_collect.core.tensordicts import take_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_rows_are_those_of_an_index(dtype: torch.dtype) -> None:
    names = [None, "time"]
    group = {"observation": torch.randint(0, 256, (7, 5, 3, 4)).to(dtype)}
    data = TensorDict(
        {
            "agents": TensorDict(group, [7, 5, 3], names=[*names, None]),
            "done": torch.rand(7, 5, 1) < 0.5,
        },
        [7, 5],
        names=names,
    )
    rows = torch.tensor([6, 0, 6])
    actual, expected = take_rows(data, rows), data[rows]
    assert actual.names == expected.names
    assert actual["agents"].names == expected["agents"].names
    assert actual["agents"].batch_size == (3, 5, 3)
    for key in ("done", ("agents", "observation")):
        assert torch.equal(actual[key], expected[key])
    actual["agents", "observation"].zero_()
    assert data["agents", "observation"].any()


def test_texts_and_lazy_stacks_are_split_into_trajectories() -> None:
    def rollout(first: int) -> TensorDict:
        ids = torch.tensor([0, 0, 1, 1, 1]) + first
        done = torch.tensor([0, 1, 0, 0, 1], dtype=torch.bool)[:, None]
        texts = NonTensorStack(*(NonTensorData(str(frame)) for frame in range(5)))
        content = {"value": torch.rand(5, 1) + 1, "text": texts, "next": {"done": done}}
        return TensorDict({**content, "collector": {"traj_ids": ids}}, [5])

    rollouts = [rollout(0), rollout(2)]
    out = split_trajectories(LazyStackedTensorDict(*rollouts, stack_dim=0))
    assert out.shape == (4, 3)
    assert out["text"][1] == ["2", "3", "4"]
    assert torch.equal(out["value"][3], rollouts[1]["value"][2:])
    assert torch.equal(out["value"][2, :2], rollouts[1]["value"][:2])
    assert not out["value"][2, 2].any()
