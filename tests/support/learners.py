"""What the ranks of a job train: a small policy of ``CountingEnv``."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from workloads.counting import CountingEnv

from marl_collect.models import make_policy


class Learner:
    """Follows the policy gradient.

    Attributes:
        policy: collects, and is trained.
        optimizer: of its parameters.
    """

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)  # DDP sends the weights of rank 0 to all.
        description = CountingEnv().description
        self._groups = description.groups
        self.policy = make_policy(description, num_cells=[8])
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self._act: Any = DistributedDataParallel(self.policy)

    def update(self, batch: Any) -> torch.Tensor:
        """Train on a batch; return all weights as one vector."""
        data = self._act(batch.reshape(-1).clone())
        loss = torch.zeros(())
        for group in self._groups:
            reward = data["next", group, "reward"][..., 0]
            loss = loss + (data[group, "action_log_prob"] * reward).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        parameters = self.policy.parameters()
        return torch.nn.utils.parameters_to_vector(parameters).detach()
