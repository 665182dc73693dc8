"""Spaces survive the conversion to JSON and back."""

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marl_collect.files.description_json import space_from_json, space_to_json

SPACES = [
    spaces.Box(-np.inf, np.inf, (31,), np.float32),
    spaces.Box(0, 255, (4, 5, 3), np.uint8),
    spaces.Box(
        np.array([0.0, -np.inf, -1.5], np.float32),
        np.array([0.1, 3.0, np.inf], np.float32),
    ),
    spaces.Box(-(2**62) - 1, 2**62 + 1, (2,), np.int64),
    spaces.Box(np.float32(0.1), np.float32(0.3), (), np.float32),
    spaces.Box(0, 1, (2, 0), np.uint8),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary([2, 2]),
    spaces.Dict(
        b=spaces.Discrete(2), a=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1)])
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_survives_the_round_trip(space: spaces.Space[Any]) -> None:
    text = json.dumps(space_to_json(space), allow_nan=False)
    assert space_from_json(json.loads(text)) == space


def test_the_bounds_of_an_image_are_written_once() -> None:
    space = spaces.Box(0, 255, (88, 88, 3), np.uint8)
    assert len(json.dumps(space_to_json(space))) < 200


def test_a_space_whose_values_are_not_arrays_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be stored"):
        space_to_json(spaces.Text(5))
    with pytest.raises(ValueError, match="Unknown kind of space"):
        space_from_json({"kind": "Graph"})
