"""A pool keeps and samples versions of a policy by rules."""

import copy

import pytest
import torch
from torch import nn

from marl_collect import PolicyPool


class Net(nn.Module):
    """One weight, which is the number of the version."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def trained(updates: int, **options: object) -> PolicyPool:
    net = Net()
    pool = PolicyPool(net, **options)  # type: ignore[arg-type]
    for _ in range(updates):
        with torch.no_grad():
            net.weight.add_(1)
        pool.update()
    return pool


def kept(pool: PolicyPool) -> list[float]:
    return [member.weight.item() for member in pool.members]


def test_every_k_th_version_replaces_the_oldest() -> None:
    pool = trained(10, size=3, every=2)
    assert pool.versions.tolist() == [6, 8, 10]
    assert kept(pool) == [6, 8, 10]
    assert not any(weight.requires_grad for weight in pool.members.parameters())


def test_the_version_that_is_beaten_most_makes_room() -> None:
    pool = trained(2, size=3, keep="best")
    # The first one has more wins, but of more games.
    for index, scores in ((0, [0, 1] * 6), (1, [1] * 4), (2, [0] * 4)):
        for score in scores:
            pool.played(index, score)
    assert pool.win_rates.tolist() == [7 / 14, 5 / 6, 1 / 6]
    pool.update()
    assert pool.versions.tolist() == [0, 3, 2]
    assert pool.win_rates[1] == 0.5


def test_random_versions_are_a_uniform_sample_of_all() -> None:
    counts = torch.zeros(20)
    for seed in range(300):
        pool = trained(38, size=4, every=2, keep="random", seed=seed)
        assert kept(pool) == pool.versions.tolist()
        counts[pool.versions // 2] += 1
    # Each version is kept with probability 4 / 20: 60 times, 7 standard deviation.
    assert ((counts - 60).abs() < 35).all()


def test_random_choices_follow_from_seeds_as_documented() -> None:
    """The numbers are those of docs/architecture.md ("Seeds")."""
    pool = trained(11, size=4, keep="random", seed=0)
    assert pool.versions.tolist() == [9, 4, 8, 5]
    picked = [pool.pick(seed) for seed in range(12)]
    assert picked == [2, 1, 0, 3, 3, 2, 1, 1, 0, 2, 3, 0]


def test_versions_that_are_added_by_hand_have_numbers_of_their_own() -> None:
    pool = trained(0, size=4, sample="latest")
    pool.add(2)
    pool.add(1)
    assert pool.versions.tolist() == [0, 2, 1, -1]
    assert pool.probabilities.tolist() == [0, 1, 0, 0]
    pool.update()
    assert pool.versions.tolist() == [0, 2, 1, 3]


def frequencies(pool: PolicyPool) -> torch.Tensor:
    picked = torch.tensor([pool.pick(seed) for seed in range(4000)])
    return torch.bincount(picked, minlength=pool.size) / 4000


def test_versions_are_sampled_by_the_rule() -> None:
    for sample, expected in (
        ("uniform", [1 / 3, 1 / 3, 1 / 3, 0]),
        ("latest", [0, 0, 1, 0]),
        ("win_rate", [5 / 9, 1 / 9, 3 / 9, 0]),
    ):
        pool = trained(2, size=4, sample=sample)
        for _ in range(4):
            pool.played(0, 0)
            pool.played(1, 1)
            pool.played(2, 0.5)
        assert (frequencies(pool) - torch.tensor(expected)).abs().max() < 0.03


def test_a_copy_is_updated_from_the_copy_of_its_policy() -> None:
    net = Net()
    pool = PolicyPool(net, size=2)
    other_net, other_pool = copy.deepcopy((net, pool))
    with torch.no_grad():
        other_net.weight.fill_(5.0)
    other_pool.update()
    assert other_pool.policy is other_net
    assert kept(other_pool) == [0, 5]
    assert kept(pool) == [0, 0]


def test_wrong_arguments_are_named() -> None:
    for options, text in (
        ({"size": 0}, "size must be an integer of at least 1, but is 0"),
        ({"every": -1}, "every must be an integer of at least 1"),
        ({"keep": "all"}, "keep must be one of"),
        ({"sample": "best"}, "sample must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            trained(0, **options)
    with pytest.raises(TypeError, match="every must be an integer"):
        trained(0, every=True)
    with pytest.raises(ValueError, match="no values for weight"):
        PolicyPool(nn.LazyLinear(3))
    with pytest.raises(TypeError, match="versions of a module"):
        PolicyPool(print)  # type: ignore[arg-type]
