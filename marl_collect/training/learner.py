"""Base class of learners: a policy, and an update from a batch."""

import abc
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from marl_collect.core.description import EnvDescription
from marl_collect.training.options import Setup, TrainingOptions

Metrics = dict[str, float]


class Learner(abc.ABC):
    """Owns networks and an optimiser, and learns from batches ``[B, T]``.

    Attributes:
        policy: what collectors act with.
        networks: name to every module that is trained, the policy among them.
        optimizer: of all of their parameters.
        prefetch: whether the next batch is collected while this one is trained on.
    """

    policy: nn.Module
    networks: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    prefetch: bool

    def __init__(
        self,
        description: EnvDescription,
        setup: Setup,
        options: TrainingOptions,
        seed: int,
    ) -> None:
        """Prepare everything but the networks.

        Args:
            description: of the environment.
            setup: algorithm, sharing and centralisation.
            options: of the run.
            seed: of the learner's random numbers.
        """
        self.description = description
        self.setup = setup
        self.options = options
        self.device = torch.device(options.device)
        self.generator = torch.Generator().manual_seed(seed)

    @abc.abstractmethod
    def update(self, batch: TensorDictBase, progress: float) -> Metrics:
        """Learn from a batch; returns the losses' means.

        Args:
            batch: ``[B, T]``, as collectors give it; not changed.
            progress: share of the run's frames that are collected, in [0, 1].
        """

    @abc.abstractmethod
    def example(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a minibatch of a batch, as ``loss`` takes it."""

    @abc.abstractmethod
    def loss(self, minibatch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to minimise, and metrics to log."""

    @property
    def unrolled(self) -> dict[str, nn.Module]:
        """Further modules with weights that the learner keeps, such as targets."""
        return {}

    @final
    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each trained parameter once."""
        seen: set[int] = set()
        for network in self.networks.values():
            for parameter in network.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs."""
        modules = self.networks | self.unrolled
        return {
            "networks": {name: net.state_dict() for name, net in modules.items()},
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` of the same setup and options."""
        for name, net in (self.networks | self.unrolled).items():
            net.load_state_dict(state["networks"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])

    @final
    def _step(self, loss: Tensor, max_grad_norm: float) -> float:
        """Take one step of gradient descent; returns the gradient's norm."""
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(list(self.parameters()), max_grad_norm)
        self.optimizer.step()
        return float(norm)
