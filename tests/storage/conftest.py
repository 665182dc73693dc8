"""A dataset that several files read."""

import pytest
import torch
from storage_streams import add_run
from tensordict import TensorDict

from marl_collect.storage import Dataset, open_dataset

Recording = tuple[Dataset, TensorDict]


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A dataset of two runs, and its 600 frames in their order."""
    path = tmp_path_factory.mktemp("recording") / "d"
    batches = [*add_run(path, 0), *add_run(path, 1)]
    return open_dataset(path), torch.cat([batch.reshape(-1) for batch in batches])


@pytest.fixture
def dataset(recording: Recording) -> Dataset:
    return recording[0]
