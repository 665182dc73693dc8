"""Takes one picture of an environment."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.env import MultiAgentEnv

Picture = NDArray[np.uint8]
"""``[height, width, 3]``."""


_VISIBLE = 240
"""Minimum pixels of the shorter side; the worlds of MeltingPot have fewer."""


def visible(picture: Picture) -> Picture:
    """Return a picture that is enlarged by an integer factor if it is small."""
    return enlarge(picture, max(1, round(_VISIBLE / min(picture.shape[:2]))))


def enlarge(picture: Picture, factor: int) -> Picture:
    """Repeat every pixel ``factor`` times in both directions."""
    return np.repeat(np.repeat(picture, factor, 0), factor, 1)


def take(env: MultiAgentEnv) -> Picture:
    """Return a copy of the environment's current picture.

    Raises:
        ValueError: if the environment renders nothing; says what to do.
    """
    image = env.render()
    if image is None:
        raise ValueError(
            f"{env.description.name} renders no picture. Build PettingZoo's "
            "environments with render_mode='rgb_array' (on the command line: --env "
            "render_mode=rgb_array); your own must return an image from render()."
        )
    return np.array(image, np.uint8)


def require_single(env: Any) -> MultiAgentEnv:
    """Check that a factory built one environment.

    Raises:
        TypeError: if it is something else.
    """
    if not isinstance(env, MultiAgentEnv):
        raise TypeError(
            "A factory for pictures must build one environment, but built "
            f"{type(env).__name__}."
        )
    return env
