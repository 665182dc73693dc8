"""A collector's state on its way to disk and back."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from marl_collect.collectors.statistics import Statistics
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.description import EnvDescription


def pack(
    statistics: Statistics, policy: TrainerPolicy, workers: list[Any]
) -> dict[str, Any]:
    """Return counters, weights and the workers' states as plain data."""
    module = policy.module
    weights = module.state_dict() if isinstance(module, torch.nn.Module) else None
    return {
        "frames": statistics.frames,
        "batches": statistics.batches,
        "policy_state_dict": weights,
        "workers": workers,
    }


def unpack(
    state_dict: Mapping[str, Any],
    statistics: Statistics,
    policy: TrainerPolicy,
    description: EnvDescription,
) -> list[Any]:
    """Load counters and weights, and return the workers' states."""
    if not description.repeats:
        warnings.warn(
            f"{description.name} does not repeat its episodes, so its environments "
            "begin new ones instead of the running ones.",
            stacklevel=3,
        )
    weights = state_dict["policy_state_dict"]
    if weights is not None and isinstance(policy.module, torch.nn.Module):
        policy.module.load_state_dict(weights)
    statistics.frames = state_dict["frames"]
    statistics.batches = state_dict["batches"]
    return list(state_dict["workers"])
