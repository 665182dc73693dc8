"""Frames for policies, made up from a description."""

import numpy as np
import torch
from tensordict import TensorDict

from marl_collect.core.description import EnvDescription, allocate
from marl_collect.core.tensordicts import assemble


def observe(description: EnvDescription, *batch: int) -> TensorDict:
    """Make up what environments of ``description`` might observe."""
    rng = np.random.default_rng(0)
    arrays = allocate(description.observed(), batch)
    for key, array in arrays.items():
        if key[-1] in ("action_mask", "mask"):
            array.fill(True)
        elif array.dtype == np.uint8:
            array[...] = rng.integers(0, 255, array.shape)
        elif array.dtype.kind == "f":
            array[...] = rng.normal(size=array.shape)
    n_agents = {name: group.n_agents for name, group in description.groups.items()}
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return assemble(tensors, batch, n_agents)
