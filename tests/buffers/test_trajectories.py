"""Trajectories as nested tensors; other forms are tested with TorchRL's behaviour."""

from typing import Any

import pytest
import torch

from marl_collect import Collector, RandomPolicy, split_trajectories
from marl_collect.testing.counting import CountingEnv


@pytest.fixture(scope="module")
def batch() -> Any:
    with Collector(CountingEnv, RandomPolicy(), frames_per_batch=40) as collector:
        return collector.next()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_trajectories_have_the_batch_size_of_torchrl(batch: Any) -> None:
    nested = split_trajectories(batch, as_nested=True)
    padded = split_trajectories(batch)
    assert nested.batch_size == (len(padded), -1)
    assert nested["hunter"].batch_size == (len(padded), -1)
    again = nested.to_padded_tensor(mask_key="valid")
    assert again.shape == padded.shape
    key = ("next", "hunter", "observation")
    assert (again[key] == padded[key]).all()
    assert (again["valid"] == padded["collector", "mask"]).all()


def test_nested_trajectories_may_be_jagged(batch: Any) -> None:
    nested = split_trajectories(batch, as_nested=torch.jagged)
    lengths = split_trajectories(batch)["collector", "mask"].sum(-1)
    observation = nested["hunter", "observation"]
    assert observation.layout == torch.jagged
    assert [len(row) for row in observation.unbind()] == lengths.tolist()


def test_other_layouts_are_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"torch\.jagged"):
        split_trajectories(batch, as_nested=torch.sparse_coo)
