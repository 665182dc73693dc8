"""Journals and batches that were forged raise an error quickly, whatever they claim."""

import base64
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage_fuzz import read_all, write
from storage_journal import (
    Entries,
    edit,
    entries,
    extent,
    forge,
    forge_notes,
    notes,
    only,
    write_entries,
)

from marl_collect import open_dataset
from marl_collect.storage import DatasetError, Writer, concatenate
from marl_collect.storage import copy as copy_dataset
from marl_collect.storage.index import JOURNAL


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "d"
    write(path)
    return path


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(intact, tmp_path / "d")


def refused(path: Path) -> None:
    """Reading raises an error of the dataset soon, and takes little memory."""
    begin = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((DatasetError, ValueError)):
        read_all(open_dataset(path))
    assert time.process_time() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB.


def batch(e: Entries, number: int = -1) -> Any:
    return only("batch", e)[number]


def empty(e: Entries, size: int, frames: int) -> None:
    """A batch that claims frames which need no bytes."""
    layout = only("layout", e)[0]
    layout.update(packed=[], follows=[])
    keys = only("keys", e)[0]
    keys[:] = [{"key": ["next", "done"], "shape": [1], "dtype": "bool"}]
    layout["record"] = {
        n: base64.b64encode(bytes(5)).decode() for n in layout["record"]
    }
    layout["tail"] = dict.fromkeys(layout["tail"], "")
    del e[e.index(next(entry for entry in e if "batch" in entry)) + 1 :]
    batch(e).update(
        shape=[size, frames], frames=size * frames, episodes=0, return_sums={}
    )
    batch(e).update(tails=0, packed=[], notes=0, checksum=0)


HOSTILE: dict[str, Callable[[Entries], Any]] = {
    "many rows": lambda e: batch(e).update(shape=[2**40, 10], frames=2**40 * 10),
    "many rows and frames": lambda e: batch(e).update(
        shape=[10**30, 10**30], frames=10**60
    ),
    "many frames": lambda e: batch(e).update(shape=[2, 2**33], frames=2**34),
    "negative rows": lambda e: batch(e).update(shape=[-2, -10]),
    "no rows": lambda e: batch(e).update(shape=[0, 10], frames=0),
    "fraction of rows": lambda e: batch(e).update(shape=[2.0, 10]),
    "shape that is text": lambda e: batch(e).update(shape="ab"),
    "shape that is a number": lambda e: batch(e).update(shape=7),
    "nothing": lambda e: batch(e).update(shape=None),
    "endless numbers": lambda e: batch(e).update(shape=[float(10**300), 1]),
    "huge offset": lambda e: batch(e).update(offset=2**63),
    "offset outside": lambda e: batch(e).update(offset=2**40),
    "negative offset": lambda e: batch(e).update(offset=-1),
    "huge segment": lambda e: batch(e).update(segment=10**40, offset=0),
    "segment that is missing": lambda e: batch(e).update(segment=1, offset=0),
    "segment that climbs": lambda e: batch(e).update(segment="../../etc/passwd"),
    "huge notes": lambda e: batch(e).update(notes=2**62),
    "negative notes": lambda e: batch(e).update(notes=-5),
    "huge frames": lambda e: batch(e)["packed"][0].__setitem__(1, 2**62),
    "negative frames": lambda e: batch(e)["packed"][0].__setitem__(1, -1),
    "sizes that are none": lambda e: batch(e).update(packed=7),
    "codec that is none": lambda e: batch(e)["packed"][0].__setitem__(0, None),
    "codec that is a list": lambda e: batch(e)["packed"][0].__setitem__(0, []),
    "unknown codec": lambda e: batch(e)["packed"][0].__setitem__(0, "../lz4"),
    "other codec": lambda e: batch(e)["packed"][0].__setitem__(0, "zstd"),
    "raw frames": lambda e: batch(e)["packed"][0].__setitem__(0, "copy"),
    "negative run": lambda e: batch(e).update(run=-1),
    "negative layout": lambda e: batch(e).update(layout=-1),
    "huge checksum": lambda e: batch(e).update(checksum=2**70),
    "huge keys": lambda e: only("keys", e)[0][0].update(shape=[2**31, 2**31, 0, 2**31]),
    "large keys": lambda e: only("keys", e)[0][0].update(shape=[2**28]),
    "many dimensions": lambda e: only("keys", e)[0][0].update(shape=[1] * 2000),
    "deep key": lambda e: only("keys", e)[0][0].update(key=["x"] * 5000),
    "keys that are none": lambda e: e.append({"keys": 7}),
    "layout that is none": lambda e: e.append({"layout": None}),
    "layout of packed text": lambda e: only("layout", e)[0].update(packed="abc"),
    "key packed twice": lambda e: only("layout", e)[0]["packed"].append(
        only("layout", e)[0]["packed"][0]
    ),
    "key packed and in tails": lambda e: only("layout", e)[0]["follows"].append(
        only("layout", e)[0]["packed"][-1]
    ),
    "large layout": lambda e: only("layout", e)[0]["record"].update(
        kind=base64.b64encode(bytes(10**6)).decode()
    ),
    "negative seed": lambda e: only("run", e)[0].update(seed=-1),
    "huge seed": lambda e: only("run", e)[0].update(seed=2**63),
    "run that is none": lambda e: e.append({"run": 3}),
    "nothing known": lambda e: e.append({"future": {}}),
    "frames without bytes": lambda e: empty(e, 2**30, 2**30),
    "negative frames without bytes": lambda e: empty(e, 1, -5),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_forged_journal_is_refused_quickly(copy: Path, case: str) -> None:
    edit(copy, HOSTILE[case])
    refused(copy)


def test_a_key_with_an_impossible_frame_is_named(copy: Path) -> None:
    edit(copy, HOSTILE["huge keys"])
    with pytest.raises(DatasetError, match="A frame of .* is more than 2,147,483,648"):
        open_dataset(copy)


@pytest.mark.parametrize("case", ["negative seed", "huge seed"])
def test_a_seed_that_is_out_of_range_is_named(copy: Path, case: str) -> None:
    edit(copy, HOSTILE[case])
    with pytest.raises(DatasetError, match="seed is"):
        open_dataset(copy)


VALUES: list[Any] = [
    *(-1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**40, 0.5, 1e300, True, None),
    *("", "../x", "\ud800", [], {}, [[]], [{}], [1], ["a"], {"a": 1}, [-1, -1]),
    *([2**62, 2**62], [[2**62]], {"kind": ""}),
]


def mutate(value: Any, draw: random.Random) -> Any:
    """Replace something in a JSON value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        return value | {name: mutate(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        index = draw.randrange(len(value))
        return [*value[:index], mutate(value[index], draw), *value[index + 1 :]]
    return draw.choice(VALUES)


def test_random_journals_raise_only_errors_of_the_dataset(copy: Path) -> None:
    draw = random.Random(3)
    original = entries(copy)
    refusals = 0
    for _ in range(400):
        content = list(original)
        offset = draw.randrange(len(content))
        content[offset] = mutate(content[offset], draw)
        write_entries(copy, content)
        begin = time.process_time()
        try:
            read_all(open_dataset(copy))
        except DatasetError:
            refusals += 1
        assert time.process_time() - begin < 1, content[offset]
    assert refusals > 100


def test_random_batches_with_right_checksums_raise_only_errors_of_the_dataset(
    copy: Path,
) -> None:
    """A wrong table must not lead out of the file or the tensors."""
    draw = random.Random(4)
    file, parts = extent(copy, 1)
    journal = copy / JOURNAL
    before, content, text = journal.read_bytes(), file.read_bytes(), notes(copy, 1)
    refusals = 0
    for _ in range(100):
        begin, end = draw.choice(
            [
                (parts.offset, parts.tails_at),
                (parts.tails_at, parts.tables_at),
                (parts.tables_at, parts.notes_at),
                (parts.notes_at, parts.packed_at),
                (0, len(text)),
                (0, len(text)),
            ]
        )
        offset = draw.randrange(begin, end)
        size = min(draw.choice([1, 4, 8]), end - offset)
        value = draw.choice([b"\xff" * size, bytes(size), draw.randbytes(size)])
        if end == len(text):
            forge_notes(copy, 1, text[:offset] + value + text[offset + size :])
        else:
            forge(copy, 1, offset, value)
        dataset = open_dataset(copy)
        try:
            read_all(dataset)
            dataset.verify()
            with np.errstate(all="ignore"):  # Returns may be huge now.
                _ = dataset.statistics
        except DatasetError:
            refusals += 1
        file.write_bytes(content)
        journal.write_bytes(before)
    read_all(open_dataset(copy))
    assert refusals > 20


def test_forged_datasets_are_not_written_or_joined(copy: Path, tmp_path: Path) -> None:
    description = open_dataset(copy).contents.description
    edit(copy, HOSTILE["segment that is missing"])
    for use in (
        lambda: Writer(copy, description),
        lambda: copy_dataset(copy, tmp_path / "copied"),
        lambda: read_all(concatenate([copy, copy])),
    ):
        with pytest.raises(DatasetError, match="data-000001 is missing"):
            use()
