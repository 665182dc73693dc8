"""A dataset that several files read."""

from typing import NamedTuple

import pytest
import torch
from storage_streams import add_run
from tensordict import TensorDict

from marl_collect.storage import Dataset, open_dataset


class Recording(NamedTuple):
    """A dataset of two runs, and its 600 frames in their order."""

    dataset: Dataset
    frames: TensorDict


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("recording") / "d"
    batches = [*add_run(path, 0), *add_run(path, 1)]
    frames = torch.cat([batch.reshape(-1) for batch in batches])
    return Recording(open_dataset(path), frames)


@pytest.fixture
def dataset(recording: Recording) -> Dataset:
    return recording.dataset
