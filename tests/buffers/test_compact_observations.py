"""What ``compact_obs`` omits is restored exactly after any change of order, or refused.

Every change is applied to two batches of the same frames: one with all next
observations, and one without. The full one says what is right.
"""

import pickle
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from tensordict import TensorDict, lazy_stack, pad
from workloads.counting import CountingEnv

from marl_collect import (
    Collector,
    EnvWrapper,
    MultiSyncCollector,
    restore_next,
    split_trajectories,
)
from marl_collect.buffers.layout import FRAME_IDS
from marl_collect.core.tensordicts import flatten

pytestmark = pytest.mark.processes

MASK = ("collector", "mask")
Change = Callable[[Any], Any]
Pair = tuple[Any, Any]
"""A batch with all next observations, and the same batch without."""

LONG = partial(CountingEnv, min_length=50, max_length=60, deaths=False)
UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


class Ages(EnvWrapper):
    """Hunters observe the seed and the number of steps in every unsigned dtype."""

    def __init__(self) -> None:
        boxes = {dtype.__name__: spaces.Box(0, 255, (2,), dtype) for dtype in UNSIGNED}
        super().__init__(CountingEnv(n_prey=0), observe={"hunter": boxes})
        self.ages = [("hunter", "observation", name) for name in boxes]

    def after_reset(self, begun: Any, seed: Any) -> None:
        for key in self.ages:
            self.row[key][begun] = [seed % 200, 1]

    def after_step(self) -> None:
        for key in self.ages:
            self.row[key][..., 1] += 1


SOURCES: dict[str, Callable[..., Any]] = {
    # Some episodes end in a batch, and others are cut by its end.
    "short": partial(
        Collector, [CountingEnv] * 3, frames_per_batch=60, total_frames=180
    ),
    # The same episodes go through all batches.
    "long": partial(Collector, [LONG] * 2, frames_per_batch=20, total_frames=60),
    "pictures": partial(
        Collector,
        [partial(CountingEnv, image=(2, 2), n_prey=0)] * 2,
        frames_per_batch=24,
        total_frames=72,
        track_traj_ids=False,
    ),
    "unsigned": partial(Collector, [Ages] * 2, frames_per_batch=40, total_frames=120),
    # The rows of the first worker end earlier.
    "ragged": partial(
        MultiSyncCollector,
        [CountingEnv] * 4,
        num_workers=2,
        frames_per_batch=[14, 24],
        total_frames=114,
    ),
}


@cache
def pairs(source: str) -> tuple[Pair, ...]:
    """Return three batches of a source, in their order."""
    kinds = []
    for options in ({}, {"compact_obs": True}):
        with SOURCES[source](seed=3, **options) as collector:
            kinds.append([batch.clone() for batch in collector])
    full, compact = kinds
    assert len(full) == len(compact) == 3
    return tuple(zip(full, compact, strict=True))


def check(full: Any, compact: Any) -> None:
    """Check that a restored batch is the full one, without any key for it."""
    restored = restore_next(compact)
    assert restored is compact
    expected, actual = flatten(full), flatten(restored)
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        assert actual[key].dtype == values.dtype, key
        assert torch.equal(actual[key], values), key
    names = set(restored.keys(include_nested=True))
    assert names == set(full.keys(include_nested=True))
    assert restore_next(restored) is restored  # There is nothing more to do.


def changed(source: str, number: int, change: Change) -> None:
    full, compact = pairs(source)[number]
    check(change(full.clone()), change(compact.clone()))


def right_or_refused(full: Any, compact: Any) -> bool:
    """Return whether a batch is restored; if not, it must be refused."""
    try:
        restore_next(compact.clone())
    except ValueError:
        with pytest.raises(ValueError, match="restore_next"):
            restore_next(compact)
        return False
    check(full, compact)
    return True


trajectories = partial(split_trajectories, prefix="collector")
rows = st.lists(st.integers(0, 7), min_size=1, max_size=9)
KEEPING: dict[str, st.SearchStrategy[Change]] = {
    "rows": rows.map(lambda r: lambda b: b[torch.tensor([i % len(b) for i in r])]),
    "row": st.integers(0, 7).map(lambda i: lambda b: b[i % len(b)]),
    "slice": st.tuples(st.integers(0, 3), st.integers(1, 2)).map(
        lambda s: lambda b: b[:: s[1]] if s[0] >= len(b) else b[s[0] :: s[1]]
    ),
    "tail": st.integers(0, 9).map(lambda t: lambda b: b[:, t:]),
    "split": st.integers(1, 3).map(lambda n: lambda b: b.split(n)[-1]),
    "flat": st.just(lambda b: b.reshape(-1)),
    "nested": st.just(lambda b: b.unsqueeze(0)),
    "stacked": st.just(lambda b: torch.stack([b, b.clone()])),
    "lazily stacked": st.just(lambda b: lazy_stack([b, b.clone()])[0]),
    "padded": st.just(lambda b: pad(b, [0, 1, 0, 2])),
    "pickled": st.just(lambda b: pickle.loads(pickle.dumps(b))),
    "trajectories": st.just(lambda b: trajectories(b).flip(0)),
    "valid": st.just(lambda b: b[b.get(MASK, b["done"][..., 0] >= 0)]),
    "hunters": st.just(lambda b: b.exclude("prey", ("next", "prey"))),
}
"""Changes after which every frame is followed by the same frame, or was last."""


@st.composite
def changes(draw: Any) -> Change:
    """Draw one to three changes, one after the other."""
    drawn = [
        draw(KEEPING[name])
        for name in draw(
            st.lists(
                st.sampled_from(["rows", "slice", "tail", "split", "pickled"]),
                max_size=2,
            )
        )
    ]
    drawn.append(draw(st.one_of(*KEEPING.values())))

    def change(batch: Any) -> Any:
        for one in drawn:
            batch = one(batch)
        return batch

    return change


NAMES = st.sampled_from(["short", "long", "pictures", "ragged"])
NUMBERS = st.integers(0, 2)


@settings(max_examples=80)
@given(NAMES, NUMBERS, changes())
def test_a_batch_is_restored_after_changes_that_keep_rows(
    source: str, number: int, change: Change
) -> None:
    changed(source, number, change)


@settings(max_examples=40)
@given(NAMES, st.lists(NUMBERS, min_size=2, max_size=4), st.data())
def test_joined_batches_are_restored(
    source: str, numbers: Sequence[int], data: st.DataObject
) -> None:
    """In any order and several times, also batches of the same episodes, and split."""
    chosen = [pairs(source)[number] for number in numbers]
    full, compact = ([pair[kind].clone() for pair in chosen] for kind in (0, 1))
    dim = data.draw(st.integers(0, 1))
    order = torch.tensor(
        data.draw(st.permutations(range(torch.cat(full, dim=dim).shape[0])))
    )
    pair = [torch.cat(batches, dim=dim)[order] for batches in (full, compact)]
    check(*(map(trajectories, pair) if data.draw(st.booleans()) else pair))


@settings(max_examples=60)
@given(NAMES, st.lists(NUMBERS, min_size=1, max_size=3), st.data())
def test_frames_in_any_order_are_right_or_refused(
    source: str, numbers: Sequence[int], data: st.DataObject
) -> None:
    chosen = [pairs(source)[number] for number in numbers]
    full, compact = (
        torch.cat([pair[kind] for pair in chosen]).reshape(-1) for kind in (0, 1)
    )
    begin = data.draw(st.integers(0, len(full) - 1))
    length = data.draw(st.integers(1, 6))
    step = data.draw(st.sampled_from([1, 1, 2, -1]))
    extra = data.draw(st.lists(st.integers(0, len(full) - 1), max_size=3))
    piece = [begin + step * i for i in range(length)]
    index = torch.tensor([i for i in (*piece, *extra) if 0 <= i < len(full)])
    right_or_refused(full[index], compact[index])


def test_frames_that_have_lost_their_following_one_are_refused() -> None:
    full, compact = pairs("long")[0]
    for change in (
        lambda b: b[:, :5],
        lambda b: b[:, ::2],
        lambda b: b.flip(1),
        lambda b: b[0, 3],
        lambda b: b.permute(1, 0),
    ):
        assert not right_or_refused(change(full.clone()), change(compact.clone()))
    assert right_or_refused(full[0, -1].clone(), compact[0, -1].clone())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [True, torch.jagged])
def test_nested_trajectories_are_refused(layout: Any) -> None:
    _, compact = pairs("short")[0]
    nested = split_trajectories(compact.clone(), as_nested=layout)
    with pytest.raises(ValueError, match="restore_next.*before"):
        restore_next(nested)


def test_without_its_store_or_ids_a_batch_is_refused() -> None:
    _, compact = pairs("short")[0]
    with pytest.raises(ValueError, match="frame_ids"):
        restore_next(compact.exclude(FRAME_IDS))
    with pytest.raises(KeyError, match="compact_obs=True"):
        restore_next(compact.exclude(("collector", "last_observations")))
    with pytest.raises(KeyError, match="compact_obs=True"):
        restore_next(TensorDict({"next": {"done": torch.zeros(2, 3, 1)}}, [2, 3]))


def test_frames_of_a_batch_whose_store_is_lost_are_refused() -> None:
    """The last observations of one batch are no replacement for those of another."""
    (_, first), (_, second), _ = pairs("long")
    swapped = second.clone()
    kept = first["collector"].get_non_tensor("last_observations")
    swapped["collector"].set_non_tensor("last_observations", kept)
    with pytest.raises(ValueError, match="restore_next"):
        restore_next(swapped)


def test_equal_runs_have_equal_frame_ids_and_different_batches_different_ones() -> None:
    def ids() -> dict[str, list[torch.Tensor]]:
        return {
            name: [compact[FRAME_IDS] for _, compact in pairs(name)]
            for name in ("short", "long", "pictures")
        }

    expected = ids()
    pairs.cache_clear()
    for name, batches in ids().items():
        assert all(map(torch.equal, batches, expected[name]))
        numbers = torch.cat([batch.flatten() for batch in batches])
        assert len(numbers.unique()) == len(numbers)
        assert (numbers > 0).all()


def test_unsigned_integers_are_restored() -> None:
    for number in range(3):
        changed("unsigned", number, trajectories)
