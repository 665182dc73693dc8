"""Observations become the features that a network reads."""

import torch
from gymnasium import spaces

from marl_collect.models.layers.inputs import VectorInput, observation_leaves


def test_categories_count_from_where_their_space_starts():
    space = spaces.Tuple(
        [spaces.Discrete(3, start=10), spaces.Discrete(2), spaces.Discrete(2, start=-1)]
    )
    net = VectorInput(observation_leaves(space, ("agent", "observation")))

    features = net(torch.tensor([10, 12]), torch.tensor([1, 0]), torch.tensor([-1, 0]))

    assert features.tolist() == [[1, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 1]]
