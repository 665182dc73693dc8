"""Moments that are kept in the folder of a dataset."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from storage_fuzz import batches, write

from marl_collect import open_dataset
from marl_collect.core.description import Key
from marl_collect.storage import (
    Dataset,
    Moments,
    Writer,
    concatenate,
    copy,
    save,
)

OBSERVATION = ("hunter", "observation")
FILE = "moments.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset without moments, of which each test gets a copy."""
    folder = tmp_path_factory.mktemp("written") / "d"
    write(folder)
    return folder


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    """A dataset without moments."""
    return shutil.copytree(written, tmp_path / "d")


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the file of moments."""
    content = json.loads((folder / FILE).read_text())
    edit(content)
    (folder / FILE).write_text(json.dumps(content))


def equal(actual: Mapping[Key, Moments], expected: Mapping[Key, Moments]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[key].mean, m.mean) and torch.equal(actual[key].std, m.std)
        for key, m in expected.items()
    )


def computed(dataset: Dataset, *keys: Key) -> dict[Key, Moments]:
    """Return moments of a selection, which are in no file."""
    frames = concatenate([dataset, dataset]).transitions
    values = frames.moments(*keys)
    assert FILE not in names(dataset.path)
    return values


def test_moments_are_kept_and_read_without_the_frames(path: Path) -> None:
    frames = open_dataset(path).transitions
    first = frames.moments(OBSERVATION, ("next", "hunter", "reward"))
    assert names(path) == {"journal.jsonl", "data-000000", ".lock", FILE}
    second = open_dataset(path).transitions
    (path / "data-000000").unlink()
    assert equal(second.moments(OBSERVATION, ("next", "hunter", "reward")), first)
    (moments,) = second.select("hunter").moments(OBSERVATION).values()
    assert torch.equal(moments.mean, first[OBSERVATION].mean)
    assert moments.mean.dtype == moments.std.dtype == torch.float32


def test_moments_of_further_keys_are_added(path: Path) -> None:
    frames = open_dataset(path).transitions
    first = frames.moments(OBSERVATION)
    both_moments = frames.moments("hunter", "next")
    assert equal({OBSERVATION: both_moments[OBSERVATION]}, first)
    (path / "data-000000").unlink()
    assert equal(open_dataset(path).transitions.moments("hunter", "next"), both_moments)


def test_moments_are_computed_again_after_a_batch_was_added(path: Path) -> None:
    before = open_dataset(path).transitions.moments(OBSERVATION)
    description, (batch,) = batches(1, 5)
    for group in ("hunter", "prey"):
        batch[group, "observation"] += 100
    with Writer(path, description) as writer:
        writer.add(batch)
    dataset = open_dataset(path)
    after = dataset.transitions.moments(OBSERVATION)
    values = dataset.transitions[:][OBSERVATION].double().flatten(0, 1)
    torch.testing.assert_close(after[OBSERVATION].mean, values.mean(0).float())
    assert not equal(after, before)
    assert equal(open_dataset(path).transitions.moments(OBSERVATION), after)


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data["moments"][0]["mean"].append(0.0),
        lambda data: data["moments"][0].update(mean=["0.0"]),
        lambda data: data["moments"][0].pop("std"),
        lambda data: data["moments"][0].update(key=["no", "such"]),
        lambda data: data["moments"][0].update(key=["..", "x"]),
        lambda data: data["moments"][0]["mean"].__setitem__(0, float("nan")),
        lambda data: data["moments"][0]["mean"].__setitem__(0, 1e300),
        lambda data: data["moments"][0]["mean"].__setitem__(0, 10**400),
        lambda data: data["moments"][0]["std"].__setitem__(0, -1.0),
        lambda data: data["journal"].__setitem__(0, data["journal"][0] - 1),
        lambda data: data["journal"].__setitem__(1, data["journal"][1] ^ 1),
        lambda data: data.pop("journal"),
    ],
)
def test_a_forged_or_stale_file_is_replaced(
    path: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    expected = open_dataset(path).transitions.moments(OBSERVATION)
    content = (path / FILE).read_bytes()
    change(path, lambda data: data["moments"][0]["mean"].__setitem__(0, 7.0))
    change(path, edit)
    assert equal(open_dataset(path).transitions.moments(OBSERVATION), expected)
    assert (path / FILE).read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_replaced(path: Path, content: bytes) -> None:
    expected = open_dataset(path).transitions.moments(OBSERVATION)
    (path / FILE).write_bytes(content)
    assert equal(open_dataset(path).transitions.moments(OBSERVATION), expected)
    assert json.loads((path / FILE).read_bytes())["moments"]


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    expected = open_dataset(path).transitions.moments(OBSERVATION)
    change(path, lambda data: data["moments"][0]["mean"].__setitem__(0, 7.0))
    content = (path / FILE).read_bytes()
    (path / FILE).rename(tmp_path / "elsewhere")
    (path / FILE).symlink_to(tmp_path / "elsewhere")
    assert equal(open_dataset(path).transitions.moments(OBSERVATION), expected)
    assert (tmp_path / "elsewhere").read_bytes() == content
    assert not (path / FILE).is_symlink()


def test_a_file_that_cannot_be_written_is_no_error(path: Path) -> None:
    expected = computed(open_dataset(path), OBSERVATION)
    (path / FILE).mkdir()  # Also root cannot replace it.
    before = names(path)
    actual = open_dataset(path).transitions.moments(OBSERVATION)
    torch.testing.assert_close(actual[OBSERVATION].mean, expected[OBSERVATION].mean)
    assert names(path) == before


def test_nan_is_not_kept(path: Path) -> None:
    description, (batch,) = batches(1, 5)
    batch[OBSERVATION][0, 0] = float("nan")
    with Writer(path, description) as writer:
        writer.add(batch)
    for _ in range(2):
        moments = open_dataset(path).transitions.moments(OBSERVATION, "prey")
        assert moments[OBSERVATION].mean.isnan().any()
        stored = json.loads((path / FILE).read_text())["moments"]
        assert list(OBSERVATION) not in [entry["key"] for entry in stored]
        assert ["prey", "observation"] in [entry["key"] for entry in stored]


def test_moments_of_selections_and_views_are_not_kept(path: Path) -> None:
    dataset = open_dataset(path)
    computed(dataset, OBSERVATION)
    some = dataset.trajectories[:2].transitions.moments(OBSERVATION)
    assert FILE not in names(path)
    assert not equal(some, dataset.transitions.moments(OBSERVATION))
    assert equal(dataset.trajectories[:2].transitions.moments(OBSERVATION), some)


def test_moments_are_not_carried_to_other_datasets(path: Path, tmp_path: Path) -> None:
    dataset = open_dataset(path)
    dataset.transitions.moments(OBSERVATION)
    dataset.verify()
    copy(path, tmp_path / "copy")
    save(dataset.trajectories[:2], tmp_path / "save")
    for name in ("copy", "save"):
        assert FILE not in names(tmp_path / name)


def test_moments_in_an_object_store_are_read_but_not_written(path: Path) -> None:
    url = "memory://store/moments"
    store = fsspec.filesystem("memory")
    copy(path, url)
    remote = open_dataset(url).transitions.moments(OBSERVATION)
    assert not store.exists(f"{url}/{FILE}")
    local = open_dataset(path).transitions.moments(OBSERVATION)
    assert equal(remote, local)
    change(path, lambda data: data["moments"][0]["mean"].__setitem__(0, 7.0))
    store.put_file(str(path / FILE), f"{url}/{FILE}")
    moments = open_dataset(url).transitions.moments(OBSERVATION)
    assert moments[OBSERVATION].mean.flatten()[0] == 7
