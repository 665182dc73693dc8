"""Trajectories as nested tensors; other forms are tested with TorchRL's behaviour."""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from workloads.counting import CountingEnv

from marl_collect import Collector, RandomPolicy, split_trajectories
from marl_collect.buffers.trajectories import TrajectoryAssembler, TrajFormat


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


def test_other_layouts_are_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"torch\.jagged"):
        split_trajectories(batch, as_nested=torch.sparse_coo)


def random_batch(
    ids: npt.NDArray[np.int64], ends: npt.NDArray[np.bool_], frames: int, *, many: bool
) -> TensorDict:
    """Return the next frames of environments, and count up their ids.

    Args:
        ids: of the running trajectories, ``[B]``; changed in place.
        ends: where trajectories end, ``[frames, B]``.
        frames: number of frames.
        many: whether the memory is ``[T, B]``.
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


class Reference:
    """Joins trajectories frame by frame."""

    def __init__(self) -> None:
        """Begin without frames."""
        self.running: dict[int, list[torch.Tensor]] = {}
        self.whole: list[torch.Tensor] = []

    def add(self, batch: TensorDict) -> None:
        """Add the observations of a batch."""
        batch = batch.clone()
        for row in range(batch.shape[0]):
            for frame in range(batch.shape[1]):
                trajectory = int(batch["collector", "traj_ids"][row, frame])
                observed = batch["team", "observation"][row, frame]
                self.running.setdefault(trajectory, []).append(observed)
                if batch["next", "done"][row, frame]:
                    self.whole.append(torch.stack(self.running.pop(trajectory)))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("form", ["padded", "cat"])
def test_whole_trajectories_equal_their_frames(form: TrajFormat, many: bool) -> None:
    """Also with many environments, whose frames are apart in a batch's memory."""
    random = np.random.default_rng(3)
    ids = np.arange(5) << 32
    assembler, reference, n_taken = TrajectoryAssembler(), Reference(), 0
    for number in range(60):
        # Long trajectories of environment 0 remain in memory that is used again.
        over = random.random((6, 5)) < [0.01, 0.2, 0.2, 0.2, 0.2]
        batch = random_batch(ids, over, 6, many=many)
        assembler.add(batch)
        reference.add(batch)
        batch.zero_()
        if number in (10, 30):  # One trajectory is cut, and its environment goes on.
            ids[2] += 1
        if number == 20:  # All are cut, by a reset.
            ids += 1
            assembler.drop_open()
        if number == 40:  # A state is one row of frames.
            held_frames = assembler.held()
            assert held_frames is not None
            assembler = TrajectoryAssembler()
            assembler.add(held_frames[None])
        assert len(assembler) == len(reference.whole) - n_taken
        if len(assembler) < 4:
            continue
        batch = assembler.take(form, 4)
        assert batch.names[-1] == "time"
        expected = reference.whole[n_taken : n_taken + 4]
        lengths = [len(trajectory) for trajectory in expected]
        if form == "cat":
            assert torch.equal(batch["team", "observation"], torch.cat(expected))
        else:
            padded = pad_sequence(expected, batch_first=True)
            assert torch.equal(batch["team", "observation"], padded)
            assert batch["collector", "mask"].sum(1).tolist() == lengths
        n_taken += 4
    assert n_taken > 80


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
