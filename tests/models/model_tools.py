"""Helpers for tests of models: a small network, and observations of a description."""

import itertools
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from marl_collect.core.description import EnvDescription, allocate
from marl_collect.core.tensordicts import assemble
from marl_collect.models import MultiAgentMLP

SETUPS = list(itertools.product([False, True], [False, True]))
N, INPUTS, OUTPUTS = 3, 5, 4


def network(
    centralised: bool, share_params: bool, n_inputs: int | None = INPUTS, **options: Any
) -> Any:
    options = {"depth": 2, "num_cells": 8} | options
    return MultiAgentMLP(
        n_inputs,
        OUTPUTS,
        N,
        centralised=centralised,
        share_params=share_params,
        **options,
    )


def observe(description: EnvDescription, *batch: int) -> TensorDict:
    """Return random observations of environments of ``description``."""
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
