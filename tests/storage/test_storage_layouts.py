"""Data are stored in layouts that differ between batches, runs and datasets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_fuzz import same
from tensordict import TensorDict
from workloads.counting import CountingEnv

from marl_collect import Collector, open_dataset
from marl_collect.core.description import EnvDescription
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    Writer,
    appending,
    concatenate,
    copy,
)

Batches = list[TensorDict]


@pytest.fixture(scope="module")
def environment() -> EnvDescription:
    return Collector(CountingEnv, frames_per_batch=2).description


def batch(size: int, length: int, seed: int = 0) -> TensorDict:
    """Return a batch ``[size, length]`` with what a writer needs, and one episode."""
    done = torch.zeros(size, length, 1, dtype=torch.bool)
    done[0, length // 2] = True
    out = TensorDict(batch_size=[size, length])
    out["done"] = torch.zeros_like(done)
    out["next", "done"], out["next", "terminated"] = done, done.clone()
    draw = torch.Generator().manual_seed(seed)
    shape = (size, length, 2, 1)
    out["next", "hunter", "reward"] = torch.randint(9, shape, generator=draw).float()
    return out


def write(path: Path, environment: EnvDescription, *runs: Batches) -> Dataset:
    for batches in runs:
        with Writer(path, DatasetDescription("c", environment)) as writer:
            for data in batches:
                writer.add(data)
    return open_dataset(path)


def check(dataset: Dataset, data: Batches) -> None:
    """Compare all ways of reading with the batches."""
    dataset.verify()
    assert same(dataset[:], data)
    frames: Any = torch.cat([td.reshape(-1) for td in data])
    assert same(dataset.transitions[:], frames)
    draw = torch.Generator().manual_seed(0)
    order = torch.randint(len(frames), (3 * len(frames),), generator=draw)
    assert same(dataset.transitions[order], frames[order])
    for key in frames.keys(True, True):
        selection = dataset.transitions.select(key)[order]
        assert same(selection, frames[order].select(key))
    assert len(dataset.trajectories) == dataset.contents.totals.episodes


def values(kind: str, count: int) -> torch.Tensor:
    """Return elements of one value, of two, or of any."""
    number = torch.arange(count)
    return {"one": number * 0 + 7, "two": number % 2 * 3, "any": number * 13 % 251}[
        kind
    ]


ORDERS = [
    ["one", "two", "any"],
    ["any", "two", "one"],
    ["two", "one", "any", "one"],
    ["one", "one", "two", "two"],
]


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16", "int64", "float32"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_constants_become_two_values_then_any(
    tmp_path: Path, environment: EnvDescription, dtype: str, order: list[str]
) -> None:
    data = []
    for number, kind in enumerate(order):
        td = batch(2, 6, number)
        content = values(kind, 12 * 3).reshape(2, 6, 3).to(getattr(torch, dtype))
        td["x"] = content
        td["next", "x"] = content.roll(-1, 1)
        data.append(td)
    dataset = write(tmp_path / "d", environment, data)
    if order[0] == "one" and dtype != "bool":
        assert len(dataset.contents.layouts) > 1
    check(dataset, data)
    check(write(tmp_path / "runs", environment, *[[td] for td in data]), data)


DTYPES = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "complex64",
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
]


@pytest.mark.parametrize("length", [1, 5])
def test_every_dtype_shape_and_unusual_value(
    tmp_path: Path, environment: EnvDescription, length: int
) -> None:
    data = []
    for number in range(2):
        td = batch(3, length, number)
        for dtype in DTYPES:
            for name, shape in (("scalar", ()), ("matrix", (2, 3)), ("none", (0, 4))):
                content = torch.randn(3, length, *shape) * 50
                td[dtype, name] = content.to(getattr(torch, dtype))
                td["next", dtype, name] = td[dtype, name].roll(-1, 1)
        td["float32", "matrix"][0, 0, 0] = float("inf")
        data.append(td)
    dataset = write(tmp_path / "d", environment, data)
    check(dataset, data)
    layout = dataset.contents.layouts[0]
    assert ("next", "bfloat16", "matrix") in layout.follows
    if length == 1:  # There is no following frame.
        assert all(entry.tails == 3 for entry in dataset.contents.batches)


def test_nan_and_negative_zero_keep_their_bits(
    tmp_path: Path, environment: EnvDescription
) -> None:
    td = batch(2, 4)
    bits = torch.tensor([0x7FC00001, 0x7FC00000, -(2**31), 0], dtype=torch.int32)
    td["x"] = bits.view(torch.float32).expand(2, 4).clone()
    td["next", "x"] = torch.zeros(2, 4)  # Equal to -0.0, but not in its bits.
    stored = write(tmp_path / "d", environment, [td])[0]
    assert torch.equal(stored["x"].view(torch.int32), bits.expand(2, 4))
    assert not stored["next", "x"].view(torch.int32).any()


def images(length: int, seed: int, pixels: int = 5000) -> TensorDict:
    td = batch(2, length, seed)
    draw = torch.Generator().manual_seed(seed)
    td["image"] = torch.randint(
        256, (2, length, pixels), generator=draw, dtype=torch.uint8
    )
    td["next", "image"] = td["image"].roll(-1, 1)
    td["next", "image"][:, -1] = 0
    return td


def unrelated(td: TensorDict) -> TensorDict:
    """Return a batch whose next values never equal the following root."""
    td = td.clone()
    for name in ("x", "image"):
        if name in td.keys():
            td["next", name] = td[name] + 1
    return td


def related(length: int, seed: int) -> TensorDict:
    td = batch(2, length, seed)
    td["x"] = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(seed))
    td["next", "x"] = td["x"].roll(-1, 1)
    return td


@pytest.mark.parametrize("make", [related, images])
def test_next_values_that_never_follow(
    tmp_path: Path, environment: EnvDescription, make: Callable[..., TensorDict]
) -> None:
    data = [unrelated(make(7, seed)) for seed in range(3)]
    dataset = write(tmp_path / "d", environment, data)
    assert not dataset.contents.layouts[0].follows or "done" in str(
        dataset.contents.layouts[0].follows
    )
    check(dataset, data)
    mixed = [make(7, 3), data[0], make(7, 4)]  # Follow at first, then not.
    check(write(tmp_path / "mixed", environment, mixed), mixed)


def test_joined_datasets_have_different_layouts(
    tmp_path: Path, environment: EnvDescription
) -> None:
    """Keys are in the tails of one dataset, and in the records of the other."""
    first = [related(6, seed) for seed in range(2)]
    second = [unrelated(related(6, seed)) for seed in range(5, 7)]
    first_dataset = write(tmp_path / "a", environment, first)
    second_dataset = write(tmp_path / "b", environment, second)
    assert ("next", "x") in first_dataset.contents.layouts[0].follows
    assert ("next", "x") not in second_dataset.contents.layouts[0].follows
    for datasets, data in (
        ([first_dataset, second_dataset], first + second),
        ([second_dataset, first_dataset, second_dataset], second + first + second),
    ):
        check(concatenate(datasets), data)
    further = [related(6, 9), unrelated(related(6, 10))]
    check(write(tmp_path / "a", environment, further), first + further)
    assert copy(tmp_path / "a", tmp_path / "copy") == 4
    check(open_dataset(tmp_path / "copy"), first + further)


def test_joined_datasets_with_equal_keys_store_different_bytes(
    tmp_path: Path, environment: EnvDescription
) -> None:
    """One layout for both must have what any of them has, whichever comes last."""
    data: dict[str, Batches] = {}
    for kind in ("any", "one", "two"):
        td = batch(2, 6)
        td["x"] = values(kind, 12 * 3).reshape(2, 6, 3).to(torch.uint8)
        data[kind] = [td]
        write(tmp_path / kind, environment, data[kind])
    for order in ORDERS[:3]:
        joined = concatenate([tmp_path / kind for kind in order])
        check(joined, [td for kind in order for td in data[kind]])


def test_batches_of_different_shapes(
    tmp_path: Path, environment: EnvDescription
) -> None:
    shapes = [(2, 6), (1, 1), (2, 1), (5, 3), (2, 6)]
    data = []
    for number, (size, length) in enumerate(shapes):
        td = batch(size, length, number)
        td["x"] = torch.full((size, length, 2), number)
        data.append(td)
    check(write(tmp_path / "d", environment, *[[td] for td in data]), data)


def test_a_batch_without_frames_is_refused_and_the_writer_stays_open(
    tmp_path: Path, environment: EnvDescription
) -> None:
    with Writer(tmp_path / "d", DatasetDescription("c", environment)) as writer:
        for empty in (batch(2, 4)[:, :0], batch(2, 4)[:0]):
            with pytest.raises(ValueError, match=r"has no frames"):
                writer.add(empty)
        writer.add(batch(2, 4))
    assert same(open_dataset(tmp_path / "d")[:], [batch(2, 4)])


@pytest.mark.parametrize("make", [related, images])
def test_data_files_are_continued_in_new_ones(
    tmp_path: Path,
    environment: EnvDescription,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., TensorDict],
) -> None:
    data = [make(6, seed) for seed in range(7)]
    path = tmp_path / "d"
    dataset = write(path, environment, data[:1])
    size = (path / "data-000000").stat().st_size
    monkeypatch.setattr(appending, "SEGMENT", 2 * size - size // 2)
    dataset = write(path, environment, data[1:4], data[4:])
    segments = [entry.segment for entry in dataset.contents.batches]
    assert segments == [0, 0, 1, 1, 2, 2, 3]
    check(dataset, data)
    # A killed writer began a file that no line names.
    (path / "data-000004").write_bytes(b"half")
    data.append(make(6, 7))
    data.append(make(6, 8))
    check(write(path, environment, data[7:]), data)
    assert copy(path, tmp_path / "copy") == 9
    check(open_dataset(tmp_path / "copy"), data)
    joined: Any = concatenate([path, tmp_path / "copy"])
    check(joined, data * 2)
