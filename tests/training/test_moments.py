"""Running moments equal those of everything at once."""

import torch

from marl_collect.training.learner import RunningMoments


def test_moments_of_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n) * 3 + 1000 for n in (1, 5, 0, 40)]
    moments = RunningMoments()
    for part in parts:
        moments.add(part)
    whole = torch.cat(parts).double()
    expected = (whole - whole.mean()) / whole.std(correction=0)
    torch.testing.assert_close(moments.standardise(whole), expected)
    other = RunningMoments()
    other.load_state_dict(moments.state_dict())
    other.add(whole)
    torch.testing.assert_close(other.standardise(whole), expected)


def test_equal_numbers_become_zeros() -> None:
    moments = RunningMoments()
    assert moments.standardise(torch.ones(2)).tolist() == [1.0, 1.0]
    moments.add(torch.full((3,), 7.0))
    assert moments.standardise(torch.full((2,), 7.0)).tolist() == [0.0, 0.0]
