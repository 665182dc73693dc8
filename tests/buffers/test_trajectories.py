"""Trajectories as nested tensors; other forms are tested with TorchRL's behaviour."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, RandomPolicy, split_trajectories
from marl_collect.buffers.trajectories import TrajectoryAssembler


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
    padded_again = nested.to_padded_tensor(mask_key="valid")
    assert padded_again.shape == padded.shape
    key = ("next", "hunter", "observation")
    assert (padded_again[key] == padded[key]).all()
    assert (padded_again["valid"] == padded["collector", "mask"]).all()


def test_nested_trajectories_may_be_jagged(batch: Any) -> None:
    nested = split_trajectories(batch, as_nested=torch.jagged)
    lengths = split_trajectories(batch)["collector", "mask"].sum(-1)
    observation = nested["hunter", "observation"]
    assert observation.layout == torch.jagged
    assert [len(row) for row in observation.unbind()] == lengths.tolist()


def test_padding_is_no_trajectory(batch: Any) -> None:
    padded = split_trajectories(batch)
    assert (split_trajectories(padded) == padded).all()
    mask = padded["collector", "mask"]
    again = split_trajectories(padded.exclude(("collector", "traj_ids")))
    assert torch.equal(again["collector", "mask"], mask)
    mask = torch.zeros_like(mask)
    for nothing in (batch[:0], batch[:, :0], padded.set(("collector", "mask"), mask)):
        with pytest.raises(ValueError, match="no valid frames to split"):
            split_trajectories(nothing)


def test_other_layouts_are_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"torch\.jagged"):
        split_trajectories(batch, as_nested=torch.sparse_coo)


def random_batch(
    ids: npt.NDArray[np.int64], ends: npt.NDArray[np.bool_], frames: int, *, many: bool
) -> TensorDict:
    """Return the next frames of environments, and count up their ids ``[B]`` in place.

    Trajectories end where ``ends`` is true, ``[frames, B]``. The memory of many
    environments is ``[T, B]``.
    """
    size = len(ids)
    numbers = np.empty((frames, size), np.int64)
    for frame in range(frames):
        numbers[frame] = ids
        ids += ends[frame]
    order = torch.contiguous_format
    leaves: dict[str, torch.Tensor] = {
        "observation": torch.rand(frames, size, 2, 3),
        "done": torch.from_numpy(ends.copy())[..., None],
        "ids": torch.from_numpy(numbers),
    }
    by_row = {key: leaf.transpose(0, 1) for key, leaf in leaves.items()}
    if not many:
        by_row = {k: leaf.clone(memory_format=order) for k, leaf in by_row.items()}
    content: dict[str, Any] = {
        "team": TensorDict({"observation": by_row["observation"]}, [size, frames, 2]),
        "next": TensorDict({"done": by_row["done"]}, [size, frames]),
        "collector": TensorDict({"traj_ids": by_row["ids"]}, [size, frames]),
    }
    return TensorDict(content, [size, frames], names=[None, "time"])


def test_frames_that_are_apart_in_memory_give_the_same_trajectories() -> None:
    """As those of many environments are."""
    taken = []
    for many in (False, True):
        torch.manual_seed(0)
        ids, ends = np.arange(3) << 32, np.eye(6, 3, dtype=np.bool_)
        assembler = TrajectoryAssembler()
        assembler.add(random_batch(ids, ends, 6, many=many))
        taken.append(assembler.take("padded"))
    assert (taken[0] == taken[1]).all()


def test_frames_of_a_trajectory_that_was_cut_are_dropped() -> None:
    ids, ends = np.arange(2) << 32, np.zeros((3, 2), np.bool_)
    assembler = TrajectoryAssembler()
    for _ in range(2):
        assembler.add(random_batch(ids, ends, 3, many=False))
        ids[0] += 1
    held = assembler.held()
    assert held is not None
    assert held["collector", "traj_ids"].tolist() == [1] * 3 + [1 << 32] * 6
    assembler.drop_open()  # After a reset.
    held = assembler.held()
    assert held is not None
    assert not len(held)


def test_memory_of_trajectories_is_used_again_when_their_last_tensor_is_gone() -> None:
    ids, ends = np.arange(3) << 32, np.ones((5, 3), np.bool_)
    assembler = TrajectoryAssembler()

    def trajectories() -> TensorDict:
        assembler.add(random_batch(ids, ends, 5, many=False))
        return assembler.take("cat")

    first = trajectories()
    row = first["team", "observation"][3]
    before, memory = row.clone(), first["next", "done"].data_ptr()
    del first
    second = trajectories()
    assert torch.equal(row, before)
    assert second["next", "done"].data_ptr() != memory
    del row
    assert trajectories()["next", "done"].data_ptr() == memory


def test_adding_many_environments_takes_as_many_calls_as_few() -> None:
    counts = []
    for size in (4, 400):
        ids = np.arange(size) << 32
        ends = np.zeros((10, size), np.bool_)
        ends[[4, 7]] = True
        batch = random_batch(ids, ends, 10, many=True)
        assembler = TrajectoryAssembler()
        assembler.add(batch)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            assembler.add(batch)
            assembler.take("padded")
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert counts[1] < 1.5 * counts[0]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_unsigned_integers_are_padded_with_zeros(dtype: torch.dtype) -> None:
    values = torch.arange(1, 7, dtype=torch.int64).to(dtype).view(1, 3, 2)
    ids = torch.tensor([[1, 1, 2]])
    data = {"x": values, "y": values[..., 0], "collector": {"traj_ids": ids}}
    padded = split_trajectories(TensorDict(data, [1, 3]))
    assert padded["x"].dtype == padded["y"].dtype == dtype
    assert padded["x"].long().tolist() == [[[1, 2], [3, 4]], [[5, 6], [0, 0]]]
    assert padded["y"].long().tolist() == [[1, 3], [5, 0]]
