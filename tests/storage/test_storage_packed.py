"""Images are compressed without loss, and `next` is stored only where it differs."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storage_fuzz import IMAGE, NOISE, batches, fuzz, same, with_images, write
from storage_journal import edit, extent, flip, forge, only
from support.scripts import start_python
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiSyncCollector, open_dataset
from marl_collect.core.description import Key
from marl_collect.storage import DatasetDescription, DatasetError, Writer
from marl_collect.storage.checks import Folder
from marl_collect.storage.index import Index
from marl_collect.storage.packed import ENTRY, PackedFrames, load_codec


def tables(path: Path, batch: int = 0) -> tuple[Path, dict[Key, PackedFrames]]:
    """Return the data file of a batch, and the tables of its packed keys."""
    index = Index.load(Folder(path))
    entry = index.batches[batch]
    file, parts = extent(path, batch)
    content = file.read_bytes()
    begin, first, packed = parts.tables_at, parts.packed_at, {}
    for key, (codec, size) in zip(entry.layout.packed, entry.packed, strict=True):
        end = begin + ENTRY * entry.count
        packed[key] = PackedFrames.of(
            "/".join(key), codec, content[begin:end], first, size
        )
        begin, first = end, first + size
    return file, packed


def add(path: Path, description: DatasetDescription, data: Any, **options: Any) -> None:
    with Writer(path, description, **options) as writer:
        for batch in data:
            writer.add(batch)


@pytest.mark.parametrize("compression", ["lz4", "zstd", "none"])
def test_every_way_of_reading_gives_the_collected_data(
    tmp_path: Path, compression: str
) -> None:
    description, data = batches(4)
    add(tmp_path / "d", description, data, compression=compression)
    dataset = open_dataset(tmp_path / "d")
    assert same([batch.clone() for batch in dataset], data)
    frames = torch.cat([batch.reshape(-1) for batch in data])
    assert same(dataset.transitions[:], frames)
    numbers = torch.randint(len(frames), (200,)).tolist()
    assert same(dataset.transitions[numbers], frames[numbers])
    for keys in ([IMAGE], [("next", *IMAGE)], [("next", *NOISE), IMAGE]):
        selection = frames[numbers].select(*keys)
        assert same(dataset.transitions.select(*keys)[numbers], selection)
    lengths = dataset.trajectories.lengths
    assert (lengths > 5).any()
    row = torch.cat([batch[0] for batch in data])  # Episodes are back to back in it.
    begin = 0
    for episode, about in zip(
        dataset.trajectories, dataset.trajectories.episodes, strict=True
    ):
        if about.environment == 0:
            assert same(episode, row[begin : begin + about.length])
            begin += about.length


def test_images_are_small_and_next_is_stored_only_at_ends(tmp_path: Path) -> None:
    description, data = batches(1)
    sizes = {}
    for compression in ("none", "lz4", "zstd"):
        path = tmp_path / compression
        add(path, description, data, compression=compression)
        table = tables(path)[1][IMAGE]
        sizes[compression] = int((table.ends - table.begins).sum())
    assert sizes["zstd"] < 0.5 * sizes["none"]
    assert sizes["lz4"] < 0.6 * sizes["none"]
    ends = data[0]["next", "done"][..., 0].clone()
    ends[:, -1] = True
    _, packed = tables(tmp_path / "lz4")
    assert set(packed) == {IMAGE, NOISE, ("next", *IMAGE), ("next", *NOISE)}
    assert np.array_equal(~packed["next", *IMAGE].follows(), ends.flatten().numpy())
    assert not packed[IMAGE].follows().any()
    assert packed[IMAGE].codec == "lz4"
    assert packed[NOISE].codec == "copy"  # Noise does not compress.


def test_next_is_not_shared_where_it_differs_in_one_bit(tmp_path: Path) -> None:
    description, data = batches(1)
    data[0]["next", "hunter", "image"][1, 4, 0, 7, 7, 2] ^= 1
    data[0]["next", "done"][:] = False
    add(tmp_path / "d", description, data)
    assert same(open_dataset(tmp_path / "d")[0].clone(), data[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_every_dtype_is_packed(tmp_path: Path, dtype: torch.dtype) -> None:
    description, data = batches(1)
    for root in (data[0], data[0]["next"]):
        root["hunter", "image"] = (root["hunter", "image"] > 90).to(dtype)
    add(tmp_path / "d", description, data)
    assert tables(tmp_path / "d")[1][IMAGE].codec == "lz4"
    dataset = open_dataset(tmp_path / "d")
    assert same(dataset[0].clone(), data[0])
    assert same(dataset.transitions[[3, 17]], data[0].reshape(-1)[[3, 17]])


def test_ragged_batches_are_packed(tmp_path: Path) -> None:
    with MultiSyncCollector(
        [CountingEnv] * 2, frames_per_batch=[10, 7], total_frames=34, seed=0
    ) as collector:
        description = DatasetDescription("c", collector.description)
        data = [with_images(batch, i) for i, batch in enumerate(collector)]
    add(tmp_path / "d", description, data)
    dataset = open_dataset(tmp_path / "d")
    assert same([batch.clone() for batch in dataset], data)
    valid = torch.cat([b.reshape(-1)[b["collector", "mask"].flatten()] for b in data])
    assert same(dataset.transitions[:], valid)


def test_runs_of_one_dataset_may_differ_in_compression(tmp_path: Path) -> None:
    description, data = batches(3)
    for batch, compression in zip(data, ("none", "zstd", "lz4"), strict=True):
        add(tmp_path / "d", description, [batch], compression=compression)
    assert same([batch.clone() for batch in open_dataset(tmp_path / "d")], data)


def test_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    description, _ = batches(1)
    unknown: Any = "gzip"
    with pytest.raises(ValueError, match="compression is 'gzip', but must be one of"):
        Writer(tmp_path / "d", description, compression=unknown)
    assert not (tmp_path / "d").exists()


def test_a_damaged_frame_is_named_and_others_are_read(tmp_path: Path) -> None:
    description, data = batches(1)
    add(tmp_path / "d", description, data)
    path, packed = tables(tmp_path / "d")
    flip(path, packed[IMAGE].extent(19)[1] - 5, bit=2)
    dataset = open_dataset(tmp_path / "d")
    assert same(dataset.transitions[:10], data[0].reshape(-1)[:10])
    with pytest.raises(DatasetError, match=r"hunter/image is damaged: .* frame 19 of"):
        _ = dataset.transitions[:]
    with pytest.raises(DatasetError, match="data-000000: hunter/image is damaged"):
        dataset.verify()


def test_tables_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    description, data = batches(1)
    add(tmp_path / "d", description, data)
    _, parts = extent(tmp_path / "d", 0)
    # The first value in the first table is where the first frame ends.
    for value in (0, 2**63, 2**64 - 1):
        forge(tmp_path / "d", 0, parts.tables_at, value.to_bytes(8, "little"))
        with pytest.raises(DatasetError, match=str(tmp_path)):
            _ = open_dataset(tmp_path / "d")[0]
    forge(tmp_path / "d", 0, parts.tables_at, bytes(8 * data[0].numel()))
    with pytest.raises(DatasetError, match="has an inconsistent table of frames"):
        _ = open_dataset(tmp_path / "d")[0]


def test_an_unknown_codec_asks_for_a_newer_version(tmp_path: Path) -> None:
    description, data = batches(1)
    add(tmp_path / "d", description, data)
    edit(
        tmp_path / "d",
        lambda e: only("batch", e)[0]["packed"][0].__setitem__(0, "lz5"),
    )
    with pytest.raises(DatasetError, match="has the codec 'lz5'.* Install a newer"):
        _ = open_dataset(tmp_path / "d")[0]


@pytest.mark.parametrize("opened", [False, True])
def test_random_damage_raises_an_error_or_gives_correct_data(
    tmp_path: Path, *, opened: bool
) -> None:
    write(tmp_path / "d", "none" if opened else "lz4")
    outcome = fuzz(tmp_path / "d", 40, seed=5, opened=opened)
    assert outcome.wrong == []
    assert outcome.errors + outcome.right == 40
    assert outcome.errors > 13


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from storage_fuzz import with_images
from marl_collect import Collector
from marl_collect.core.description import Key
from marl_collect.storage import DatasetDescription, Writer
from workloads.counting import CountingEnv

collector = Collector([CountingEnv] * 2, frames_per_batch=60, seed=3)
with Writer(sys.argv[1], DatasetDescription("c", collector.description)) as writer:
    for number, batch in enumerate(collector):
        writer.add(with_images(batch, number))
        print(number, flush=True)
"""


@pytest.mark.parametrize("after", [1, 2, 3])
def test_packed_batches_survive_a_kill(tmp_path: Path, after: int) -> None:
    path = tmp_path / "d"
    with start_python("-c", KILLED, path, Path(__file__).parent) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if int(line) == after:
                break
        time.sleep(0.01 * after)  # noqa: TID251 - to kill it in different places of a write
        program.kill()
        reported = [after, *map(int, program.stdout.read().split())]
    dataset = open_dataset(path)
    assert len(dataset) in (reported[-1] + 1, reported[-1] + 2)
    collector = Collector([CountingEnv] * 2, frames_per_batch=60, seed=3)
    for number, batch in enumerate(dataset):
        assert same(batch.clone(), with_images(collector.next(), number))


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("size", [0, 100, 300, 70_000, 80_001])
def test_a_frame_of_another_size_is_an_error(compression: str, size: int) -> None:
    """The codecs would leave the rest of the memory as it is."""
    encode, decode = load_codec(compression)
    encoded_frame = encode(np.full(size, 7, np.uint8))
    out = np.empty(80_000, np.uint8)
    with pytest.raises(
        (ValueError, RuntimeError), match=rf"{size:,} bytes, not 80,000"
    ):
        decode(memoryview(encoded_frame), out)
    encoded = encode(np.full(80_000, 7, np.uint8))
    for content in (b"", encoded[:3], encoded[:6], b"x" * len(encoded)):
        with pytest.raises((ValueError, RuntimeError)):
            decode(memoryview(content), out)
    decode(memoryview(encoded), out)
    assert (out == 7).all()
