"""Training rewards: each agent's own, or the team's."""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from marl_collect.core.description import EnvDescription

FLAGS = ("done", "terminated")


def team_reward(batch: TensorDictBase, description: EnvDescription) -> Tensor:
    """Sum each frame's rewards over all agents of all groups: ``[*B, 1]``."""
    sums = [batch["next", name, "reward"].sum(-2) for name in description.groups]
    return torch.stack(sums).sum(0)


def n_agents(description: EnvDescription) -> int:
    """Count the agents of all groups."""
    return sum(group.n_agents for group in description.groups.values())


def write_rewards(
    data: TensorDictBase, description: EnvDescription, *, team: bool, scale: float
) -> None:
    """Replace each group's rewards under ``next`` by the ones used for training.

    With the team's reward, every agent gets the mean over all agents, and trajectories
    end with the episode: an agent that died still gains from the others' actions.

    Args:
        data: ``[*B]``, with ``("next", group, "reward")`` ``[*B, n, 1]`` and flags.
        description: of the environment.
        team: whether to use the team's reward.
        scale: factor of the rewards.
    """
    mean = team_reward(data, description) / n_agents(description) if team else None
    for name in description.groups:
        key = ("next", name, "reward")
        own = data[key]
        if mean is None:
            data[key] = own * scale
            continue
        data[key] = (mean * scale).unsqueeze(-2).expand_as(own).contiguous()
        for flag in FLAGS:
            root = data["next", flag].unsqueeze(-2)
            data["next", name, flag] = root.expand_as(own).contiguous()
