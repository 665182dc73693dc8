"""The rows of a TensorDict."""

import pytest
import torch
from tensordict import TensorDict

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
