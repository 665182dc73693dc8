"""Running moments of nothing, and of equal numbers; others are in ``reference/``."""

import torch

from marl_collect.training.learner import RunningMoments


def test_equal_numbers_become_zeros() -> None:
    moments = RunningMoments()
    assert moments.standardise(torch.ones(2)).tolist() == [1.0, 1.0]
    moments.add(torch.full((3,), 7.0))
    moments.add(torch.zeros(0))
    assert moments.standardise(torch.full((2,), 7.0)).tolist() == [0.0, 0.0]
