"""Recorded values of small arrays are returned by frame: what the oracle lacks."""

from typing import Any

import numpy as np

from marl_collect.buffers.frame_blocks import FrameBlocks
from marl_collect.core.description import Field, Key, allocate

FIELDS = {
    ("done",): Field((1,), np.dtype(np.bool_)),
    ("g", "reward"): Field((3, 1), np.dtype(np.float32)),
    ("g", "action"): Field((3,), np.dtype(np.int64)),
    ("g", "observation"): Field((3, 5), np.dtype(np.float64)),
}


def test_arrays_with_separate_memory_are_restored() -> None:
    arrays: dict[Key, Any] = {
        key: np.zeros((2, *field.shape), field.dtype) for key, field in FIELDS.items()
    }
    blocks = FrameBlocks(arrays)
    rng = np.random.default_rng(0)
    for _ in range(2):
        expected: dict[Key, list[Any]] = {key: [] for key in arrays}
        for _ in range(4):
            for key, array in arrays.items():
                array[...] = rng.integers(0, 2, array.shape)
                expected[key].append(array.copy())
            blocks.record()
        actual = blocks.drain()
        assert actual.keys() == arrays.keys()
        for key, values in actual.items():
            assert values.dtype == arrays[key].dtype
            np.testing.assert_array_equal(values, np.stack(expected[key]))
    assert all(len(values) == 0 for values in blocks.drain().values())


def test_allocated_arrays_are_aligned_apart_and_zero() -> None:
    arrays = allocate(FIELDS | {("large",): Field((5000,), np.dtype(np.uint8))}, (2,))
    assert arrays["large",].ctypes.data % 64 == 0
    for number, array in enumerate(arrays.values()):
        assert array.flags.aligned
        assert not array.any()
        array.fill(number + 1)
    for number, array in enumerate(arrays.values()):
        assert (array == np.asarray(number + 1).astype(array.dtype)).all()
