"""Datasets that several files read."""

from typing import NamedTuple

import pytest
import torch
from storage_streams import collected, write
from tensordict import TensorDict

from marl_collect.storage import Dataset, open_dataset


class Recording(NamedTuple):
    """A dataset of two runs whose episodes cross batches.

    Attributes:
        dataset: as it was opened.
        runs: the frames of each run ``[3, 100]``.
        frames: all frames ``[600]`` in the order of the dataset.
    """

    dataset: Dataset
    runs: list[TensorDict]
    frames: TensorDict


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A dataset that is read only."""
    path = tmp_path_factory.mktemp("recording") / "d"
    runs: list[TensorDict] = []
    flat: list[TensorDict] = []
    for seed in (0, 1):
        about, batches = collected(3, frames=30, batches=10, seed=seed, state=True)
        write(path, batches, about)
        runs.append(torch.cat(batches, 1))
        flat += [batch.reshape(-1) for batch in batches]
    return Recording(open_dataset(path), runs, torch.cat(flat))
