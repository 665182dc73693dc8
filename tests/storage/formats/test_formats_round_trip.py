"""An exported dataset is imported with equal episodes, whatever they hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_spaces import EverySpace
from support.datasets import record_here
from tensordict.nn import TensorDictModule
from workloads.counting import CountingEnv, CountingOptions

from marl_collect import record
from marl_collect.core.tensordicts import flatten
from marl_collect.storage import (
    Dataset,
    DatasetDescription,
    export_dataset,
    import_dataset,
)
from marl_collect.storage.files import size_of
from marl_collect.storage.formats import blocks
from marl_collect.storage.formats.registry import find_format
from marl_collect.storage.index import Index


def many_groups() -> Any:
    options = CountingOptions(action_mask=True, state=True, episode_reward=True)
    return CountingEnv(options)


def changes_observations(path: Path) -> Dataset:
    """A policy that writes other observations to the root, and outputs of its own."""

    def act(seen: Any) -> Any:
        return seen * 2, torch.randint(4, seen.shape[:-1]), seen.sum(-1)

    options = CountingOptions(n_prey=0)
    observation, action, extra = (
        ("hunter", n) for n in ("observation", "action", "extra")
    )
    policy = TensorDictModule(act, [observation], [observation, action, extra])
    return record_here(path, lambda: CountingEnv(options), policy, episodes=6, seed=2)


def two_runs(path: Path) -> Dataset:
    record(path, many_groups, episodes=5, num_workers=2, seed=4)
    return record(path, many_groups, episodes=4, seed=5)


CASES: dict[str, Callable[[Path], Dataset]] = {
    "vectors, masks, groups, two runs": two_runs,
    "every space": lambda path: record_here(path, EverySpace, episodes=4, seed=1),
    "packed images": lambda path: record_here(
        path, lambda: CountingEnv(CountingOptions(image=(40, 44, 3))), episodes=5
    ),
    "one-hot, frame limit": lambda path: record_here(
        path,
        lambda: CountingEnv(CountingOptions(categorical_actions=False, mask=False)),
        episodes=5,
        max_frames_per_traj=7,
    ),
    "changed by the policy": changes_observations,
}


@pytest.fixture(params=["hdf5", "huggingface"])
def file_format(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A format, and the target of an export."""
    try:
        find_format(request.param)
    except ImportError:
        pytest.skip(f"needs the extra {request.param}")
    return request.param, str(tmp_path / "out")


def check_equal(actual: Any, expected: Any) -> None:
    """Compare all episodes bit by bit, and what is known about them."""
    assert len(actual) == len(expected)
    for ours, truth in zip(actual, expected, strict=True):
        ours, truth = flatten(ours), flatten(truth)
        assert ours.keys() == truth.keys()
        for key, tensor in truth.items():
            assert ours[key].dtype == tensor.dtype, key
            assert ours[key].shape == tensor.shape, key
            assert ours[key].numpy().tobytes() == tensor.numpy().tobytes(), key
    assert actual.seeds == expected.seeds
    assert actual.episodes[0].returns == expected.episodes[0].returns
    assert actual.contents.description == expected.contents.description


@pytest.fixture(scope="module", params=CASES)
def dataset(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    """A dataset of one of the cases, recorded once for all formats."""
    recorded = CASES[request.param](tmp_path_factory.mktemp("recorded") / "d")
    lengths = recorded.trajectories.lengths[1:]
    assert len(set(lengths)) > 1 or request.param == "every space"
    return recorded


def test_imported_episodes_are_equal(
    dataset: Dataset, file_format: tuple[str, str], tmp_path: Path
) -> None:
    name, target = file_format
    selection = dataset.trajectories[1:]
    export_dataset(selection, target, name)
    imported = import_dataset(target, tmp_path / "again", name)
    check_equal(imported.trajectories, selection)
    runs = [run.to_json() for run in imported.contents.runs]
    assert runs == [run.to_json() for run in dataset.contents.runs]


def test_an_export_of_short_episodes_is_smaller_than_the_dataset(
    tmp_path: Path,
) -> None:
    pytest.importorskip("h5py", reason="needs the extra hdf5")
    options = CountingOptions(min_length=3, max_length=9)
    dataset = record_here(tmp_path / "d", lambda: CountingEnv(options), episodes=100)
    file = export_dataset(dataset, tmp_path / "out.hdf5")
    assert file.stat().st_size < size_of(tmp_path / "d")


def test_frames_that_follow_from_others_are_not_stored_twice(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    dataset = record_here(tmp_path / "d", CountingEnv, episodes=5)
    with h5py.File(export_dataset(dataset, tmp_path / "out.hdf5")) as file:
        assert len(file["frames/next/prey/observation"]) == 5
        assert len(file["frames/prey/observation"]) == dataset.contents.totals.frames
        assert "stored" not in file
        assert file["episodes/seed"][:].tolist() == dataset.trajectories.seeds


def test_a_block_has_episodes_of_one_run_and_not_too_many_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "_FRAMES", 10)
    description = DatasetDescription("counting", CountingEnv().description)
    contents = Index(description)
    runs = [0, 0, 0, 0, 0, 1]
    cuts = [*blocks.cuts(contents, [4, 4, 4, 12, 1, 1], runs)]
    assert cuts == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
