"""Small networks on busy cores: a second thread costs more than it computes."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
