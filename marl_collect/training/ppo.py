"""IPPO and MAPPO, with TorchRL's clipped loss and advantage estimate.

Sources:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv 1707.06347.
    IPPO: de Witt et al., "Is Independent Learning All You Need in the StarCraft
    Multi-Agent Challenge?", arXiv 2011.09533.
    MAPPO: Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent
    Games", arXiv 2103.01955.
"""

from typing import Any, final

import torch
from tensordict import TensorDictBase
from torch import Tensor

from marl_collect.core.description import EnvDescription
from marl_collect.models import make_policy
from marl_collect.training.critics import make_critic
from marl_collect.training.learner import Learner, Metrics, write_rewards
from marl_collect.training.options import ACTIVATIONS, Setup, TrainingOptions

LOGGED = ("entropy", "kl_approx", "clip_fraction", "explained_variance")


@final
class PPOLearner(Learner):
    """Trains a policy and a critic for all groups, with one clipped loss per group.

    Rows of agents that do not act are left out of the losses, and of the mean and the
    standard deviation that normalise the advantages.
    """

    def __init__(
        self,
        description: EnvDescription,
        setup: Setup,
        options: TrainingOptions,
        seed: int,
    ) -> None:
        """Build the networks, with weights initialised from ``seed``."""
        from torchrl.objectives.value import GAE

        super().__init__(description, setup, options, seed)
        torch.manual_seed(seed)
        self.ppo = options.ppo
        self.prefetch = options.ppo.prefetch
        self.policy = make_policy(
            description,
            centralised=setup.centralised,
            share_params=setup.share_params,
            num_cells=options.num_cells,
            activation_class=ACTIVATIONS[options.activation],
        ).to(self.device)
        self.critic = make_critic(description, setup, options).to(self.device)
        self.networks = {"policy": self.policy, "critic": self.critic}
        self.optimizer = torch.optim.Adam(
            list(self.parameters()), lr=self.ppo.lr, eps=1e-5
        )
        self._losses = {name: self._make_loss(name) for name in description.groups}
        self._estimator = GAE(
            gamma=options.gamma, lmbda=self.ppo.lmbda, value_network=None
        )

    def update(self, batch: TensorDictBase, progress: float) -> Metrics:
        """Train on the batch for several epochs of minibatches."""
        lr = self.ppo.lr * (1 - progress if self.ppo.anneal else 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        data = self.prepare(batch)
        sums: dict[str, float] = {}
        steps = 0
        for _ in range(self.ppo.epochs):
            order = torch.randperm(len(data), generator=self.generator)
            for rows in order.split(self.ppo.minibatch_frames):
                loss, logged = self.loss(data[rows])
                norm = self._step(loss, self.ppo.max_grad_norm)
                steps += 1
                for name, value in (logged | {"grad_norm": torch.tensor(norm)}).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        return {name: value / steps for name, value in sums.items()} | {"lr": lr}

    def prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Estimate advantages and return the data for the loss, ``[B * T]``."""
        data = batch.select(*self._inputs(batch)).to(self.device)
        write_rewards(
            data,
            self.description,
            team=self.options.reward == "team",
            scale=self.options.reward_scale,
        )
        with torch.no_grad():
            self.critic(data)
            self.critic(data["next"])
            for name in self.description.groups:
                self._estimate(data, name)
        return data.exclude("next").reshape(-1)

    def example(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the first minibatch of a batch."""
        return self.prepare(batch)[: self.ppo.minibatch_frames]

    def loss(self, minibatch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the groups' losses, and the groups' mean metrics."""
        losses: list[Tensor] = []
        logged: dict[str, Tensor] = {}
        share = 1 / len(self._losses)
        for module in self._losses.values():
            for name, value in module(minibatch).items():
                if name.startswith("loss_"):
                    losses.append(value)
                elif name not in LOGGED:
                    continue
                logged[name] = logged.get(name, 0.0) + share * value.detach().mean()
        return torch.stack(losses).sum(), logged

    def _estimate(self, data: TensorDictBase, name: str) -> None:
        self._estimator.set_keys(
            **{key: (name, key) for key in ("reward", "done", "terminated")},
            value=(name, "state_value"),
            advantage=(name, "advantage"),
            value_target=(name, "value_target"),
        )
        self._estimator(data, time_dim=1)
        advantage = data[name, "advantage"]
        acting = advantage
        if self.description.groups[name].mask:
            acting = advantage[data[name, "mask"]]
        scale = acting.std(correction=0).clamp_min(1e-6)
        data[name, "advantage"] = (advantage - acting.mean()) / scale

    def _inputs(self, batch: TensorDictBase) -> list[Any]:
        """Return the keys that training reads."""
        keys: set[Any] = {("next", "done"), ("next", "terminated")}
        for name in self.description.groups:
            keys |= {(name, "action"), (name, "action_log_prob")}
            keys |= {("next", name, k) for k in ("reward", "done", "terminated")}
            for key in batch[name].keys(include_nested=True, leaves_only=True):
                parts = (key,) if isinstance(key, str) else key
                if parts[0] == "observation":
                    keys |= {(name, *parts), ("next", name, *parts)}
                elif parts[0] in ("mask", "action_mask"):
                    keys.add((name, *parts))
        return list(keys)

    def _make_loss(self, name: str) -> Any:
        from torchrl.objectives import ClipPPOLoss

        several = len(self.description.groups) > 1
        loss = ClipPPOLoss(
            self.policy[name] if several else self.policy,  # type: ignore[index]
            self.critic,
            clip_epsilon=self.ppo.clip_epsilon,
            entropy_coeff=self.ppo.entropy_coeff,
            critic_coeff=self.ppo.critic_coeff,
            loss_critic_type="l2",
            normalize_advantage=False,
            functional=False,
            device=self.device,
        )
        loss.set_keys(
            action=(name, "action"),
            sample_log_prob=(name, "action_log_prob"),
            value=(name, "state_value"),
            advantage=(name, "advantage"),
            value_target=(name, "value_target"),
        )
        masked = self.description.groups[name].mask
        loss.loss_mask_key = (name, "mask") if masked else None
        return loss
