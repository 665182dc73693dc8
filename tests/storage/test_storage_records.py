"""Records are stored with few bytes, and read byte by byte as they were."""

import itertools
import json

import numpy as np
import pytest

from marl_collect.storage.checks import DatasetError
from marl_collect.storage.records import Bytes, Column, RecordLayout


def records(kinds: list[int], n: int, seed: int = 0) -> Bytes:
    """Return records ``[n, R]`` whose bytes are of these kinds."""
    draw = np.random.default_rng(seed)
    out = np.empty((n, len(kinds)), np.uint8)
    for column, kind in enumerate(kinds):
        values = draw.permutation(256)[: (1, 2, 256)[kind]]
        out[:, column] = values[np.arange(n) % len(values)]
        out[:, column] = draw.permutation(out[:, column])
    return out


def read(layout: RecordLayout, content: Bytes) -> Bytes:
    return Column(layout, 0, content.shape[1]).read(layout.encode(content))


@pytest.mark.parametrize("kinds", itertools.product(range(3), repeat=3))
def test_all_kinds_of_bytes(kinds: tuple[int, ...]) -> None:
    content = records([*kinds], 300)
    layout = RecordLayout.of(content)
    assert layout.kind.tolist() == [*kinds]
    assert layout.size == (1 if 1 in kinds else 0) + kinds.count(2)
    assert layout.encode(content).shape == (300, layout.size)
    assert (read(layout, content) == content).all()
    assert (read(layout, content[:0]) == content[:0]).all()
    for begin, end in itertools.combinations(range(4), 2):
        column = Column(layout, begin, end)
        stored_column = column.read(layout.encode(content))
        assert (stored_column == content[:, begin:end]).all()
        assert stored_column.flags.c_contiguous
        assert column.is_constant == (not any(kinds[begin:end]))


@pytest.mark.parametrize("width", [1, 7, 8, 9, 16, 17, 33, 64, 65, 200])
def test_random_bytes_of_all_widths(width: int) -> None:
    draw = np.random.default_rng(width)
    for share in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [5, 3, 2], [8, 1, 1], [1, 8, 1]):
        kinds = draw.choice(3, width, p=np.array(share) / sum(share))
        # Runs of equal kinds, as elements of several bytes have.
        kinds = np.repeat(kinds, draw.choice([1, 4, 40]))[:width]
        content = records(kinds.tolist(), 257, width)
        layout = RecordLayout.of(content)
        reloaded = RecordLayout.from_json(
            json.loads(json.dumps(layout.to_json())), width
        )
        stored = layout.encode(content)
        for _ in range(12):
            begin, end = sorted(draw.integers(0, width + 1, 2).tolist())
            rows = draw.integers(0, len(content), draw.choice([0, 1, 5, 300]))
            for record_layout in (layout, reloaded):
                actual = Column(record_layout, begin, end).read(stored[rows])
                assert (actual == content[rows, begin:end]).all()
                assert actual.shape == (len(rows), end - begin)
                assert actual.flags.c_contiguous


def test_records_without_bytes() -> None:
    content = np.empty((5, 0), np.uint8)
    layout = RecordLayout.of(content)
    assert layout.size == 0
    assert read(layout, content).shape == (5, 0)


def test_a_layout_that_fits_is_not_replaced() -> None:
    wide = np.zeros(3, np.bool_)
    content = records([0, 1, 2], 300)
    layout = RecordLayout.of(content)
    for rows in (content, content[:1], content[:2], content[5:8]):
        assert layout.joined(RecordLayout.of(rows), wide) is layout


@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("wide", [False, True])
def test_joined_layouts_store_both(before: int, after: int, *, wide: bool) -> None:
    for seed in range(30):
        first = records([before], 300, seed)
        second = records([after], 300, seed + 100)
        layout = RecordLayout.of(first)
        joined = layout.joined(RecordLayout.of(second), np.array([wide]))
        for content in (first, second):
            assert (read(joined, content) == content).all()
        values = np.unique(np.concatenate([first, second]))
        (kind,) = joined.kind
        if joined is not layout:
            assert kind == (2 if wide or len(values) > 2 else len(values) - 1)
        assert joined.joined(RecordLayout.of(second), np.array([wide])) is joined
        assert joined.joined(layout, np.array([wide])) is joined


def test_a_constant_becomes_two_values_then_any() -> None:
    wide = np.zeros(1, np.bool_)
    layout = RecordLayout.of(np.array([[7]], np.uint8))
    contents = [np.array([[value]], np.uint8) for value in (7, 9, 7, 9, 8, 200)]
    kinds = []
    for content in contents:
        layout = layout.joined(RecordLayout.of(content), wide)
        kinds.append(int(layout.kind[0]))
    assert kinds == [0, 1, 1, 1, 2, 2]
    for content in contents:
        assert (read(layout, content) == content).all()


def test_all_bytes_of_an_element_vary_if_one_has_any_value() -> None:
    content = records([0, 2, 0, 0, 1, 0, 0, 0, 2, 0], 300)
    layout = RecordLayout.of(content)
    widened = layout.widened(0, 8, 4)
    assert widened.kind.tolist() == [2, 2, 2, 2, 1, 0, 0, 0, 2, 0]
    assert layout.kind.tolist() == [0, 2, 0, 0, 1, 0, 0, 0, 2, 0]
    assert (read(widened, content) == content).all()
    other = content.copy()
    other[:, 0] += 1
    assert (read(widened, other)[:, :4] == other[:, :4]).all()
    assert layout.widened(4, 4, 4).kind.tolist() == layout.kind.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "AAA="},
        {"low": "AAAAAA=="},
        {"high": ""},
        {"kind": "AwAA"},  # Kind 3.
    ],
)
def test_layouts_of_other_sizes_are_refused(change: dict[str, str]) -> None:
    layout = RecordLayout.of(np.zeros((1, 3), np.uint8))
    with pytest.raises(DatasetError, match="is not one of records of 3 bytes"):
        RecordLayout.from_json(layout.to_json() | change, 3)
