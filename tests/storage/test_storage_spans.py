"""Spans equal lists of frame numbers."""

import numpy as np
import pytest

from marl_collect.storage.spans import Spans, ranges

ITEMS = [[(3, 7)], [(10, 12), (15, 16)], [], [(0, 3)], [(16, 20), (20, 22)], [(30, 31)]]


def spans_of(items: list[list[tuple[int, int]]]) -> Spans:
    """The spans of items."""
    table = np.array([span for item in items for span in item], np.int64).reshape(-1, 2)
    return Spans(table[:, 0], table[:, 1], np.cumsum([0, *map(len, items)]))


def frames(items: list[list[tuple[int, int]]]) -> list[list[int]]:
    """The frames of each item."""
    return [[f for begin, end in item for f in range(begin, end)] for item in items]


def test_spans_equal_lists_of_frames() -> None:
    spans, lists = spans_of(ITEMS), frames(ITEMS)
    flat = [frame for item in lists for frame in item]
    assert len(spans) == len(ITEMS)
    lengths = np.diff(spans.item_starts)
    assert lengths.tolist() == [len(item) for item in lists]
    assert spans.frames().tolist() == flat
    assert spans.starts.tolist() == [0, 4, 6, 7, 10, 14, 16, 17]
    positions = np.random.default_rng(0).permutation(len(flat))
    assert spans.locate(positions).tolist() == [flat[p] for p in positions]


@pytest.mark.parametrize("indices", [[], [0], [2], [5, 0, 0, 2, 4], [1, 3, 1]])
def test_items_are_taken_in_any_order(indices: list[int]) -> None:
    selection = spans_of(ITEMS).take(np.array(indices, np.int64))
    lists = [frames(ITEMS)[span_list] for span_list in indices]
    assert len(selection) == len(indices)
    lengths = np.diff(selection.item_starts)
    assert lengths.tolist() == [len(span_list) for span_list in lists]
    assert selection.frames().tolist() == [f for span_list in lists for f in span_list]


def test_neighbours_are_joined() -> None:
    joined = spans_of(ITEMS).joined()
    pairs = list(zip(joined.begin.tolist(), joined.end.tolist(), strict=True))
    assert pairs == [(3, 7), (10, 12), (15, 16), (0, 3), (16, 22), (30, 31)]
    assert len(joined) == len(pairs)
    assert joined.frames().tolist() == spans_of(ITEMS).frames().tolist()
    spans = spans_of([[(5, 9)], [(9, 11)]]).joined()
    assert spans.locate(np.array([0, 5])).tolist() == [5, 10]


def test_nothing_has_no_spans() -> None:
    nothing = spans_of([])
    for spans in (nothing, nothing.joined(), spans_of(ITEMS).take(np.array([], int))):
        assert len(spans) == 0
        assert spans.frames().tolist() == np.diff(spans.item_starts).tolist() == []
        assert spans.locate(np.array([], np.int64)).tolist() == []


def test_ranges_are_back_to_back() -> None:
    actual = ranges(np.array([5, 0, 9, 2]), np.array([2, 0, 3, 1]))
    assert actual.tolist() == [5, 6, 9, 10, 11, 2]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []
