"""MADDPG and IDDPG: deterministic policies with continuous actions, off-policy.

Sources:
    Lowe et al., "Multi-Agent Actor-Critic for Mixed Cooperative-Competitive
    Environments", arXiv 1706.02275.
    Lillicrap et al., "Continuous control with deep reinforcement learning", arXiv
    1509.02971, which IDDPG applies to each agent by itself.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.core.description import EnvDescription
from marl_collect.core.torch_defaults import float32_on
from marl_collect.models import make_critic, make_policy
from marl_collect.models.layers.inputs import LocScale
from marl_collect.training.advantages import acting
from marl_collect.training.learner import Metrics, training_rewards, trajectory_ids
from marl_collect.training.off_policy import OffPolicyLearner
from marl_collect.training.options import (
    Setup,
    TrainingOptions,
    network_options,
)
from marl_collect.training.ppo import layers_of, stacked_tensors

_OTHERS = ("replay", "minibatch_ep", "episodes", "double_q", "epsilon", "mixing")
"""Beginnings of the names of options of values that other learners read."""
_EXPERIENCE = ("acts", "follows", "reward", "discount", "counts")


@final
class MADDPGLearner(OffPolicyLearner):
    """Trains policies whose actions have the highest values, and these values.

    An agent's value depends on the observations and actions of all agents of all groups
    (MADDPG) or on the agent's own (IDDPG). In a policy's loss, the agent's own action
    comes from its policy, and those of the others from the replay buffer. Actions of
    agents that do not act are 0 there.

    Normal noise of a constant standard deviation is added to the policy's outputs,
    before they are squashed into the bounds of an action.
    """

    losses = ("loss_critic", "loss_objective")
    clips_apart = True
    target: nn.ModuleDict

    @float32_on("cpu")
    def __init__(
        self,
        description: EnvDescription,
        setup: Setup,
        options: TrainingOptions,
        seed: int,
    ) -> None:
        """Build the networks, with weights initialised from ``seed``.

        Raises:
            TypeError: if actions are not Box, or no network reads the observations.
            ValueError: if networks shall have memory or read last actions, or if
                training would never begin.
        """
        super().__init__(description, setup, options, seed)
        for name, group in description.groups.items():
            if not isinstance(group.action, spaces.Box):
                raise TypeError(
                    f"{setup.algorithm} needs continuous actions (Box), but {name} "
                    f"acts in {group.action}. Use ippo, mappo, vdn or qmix."
                )
        for option in ("recurrent", "last_action"):
            if setting := getattr(options, option):
                raise ValueError(
                    f"{option} is {setting!r}, but {setup.algorithm} replays single "
                    f"frames, to networks without memory: omit {option}."
                )
        self.names = list(description.groups)
        self.central = setup.algorithm == "maddpg"
        self.policy_options |= {"return_log_prob": False}
        policy: Any = make_policy(description, **self.policy_options)
        self.policy = policy.to(self.device)
        critic = make_critic(
            description,
            actions=True,
            **network_options(setup, options, description, centralised=self.central),
        ).to(self.device)
        self.networks = {"policy": self.policy, "critic": critic}
        self._set_noise()
        self._copy_to_target(nn.ModuleDict(self.networks))
        self.optimizer = self._adam(self.value.lr)
        self.optimizer.param_groups[0]["lr"] = self.value.policy_lr or self.value.lr
        self.inputs = [
            key
            for key in dict.fromkeys([*policy.in_keys, *critic.in_keys])
            if key[-1] != "action"
        ]
        self.load_initial()

    @classmethod
    def default_setups(cls, algorithm: str, *, agent_ids: bool) -> list[Setup]:
        """Return no setup: they are compared if they are named."""
        del algorithm, agent_ids
        return []

    @classmethod
    @override
    def ignores(cls, setting: str, setup: Setup, options: TrainingOptions) -> bool:
        if setting == "network":
            return not setup.centralised and setup.algorithm != "maddpg"
        part, _, name = setting.rpartition(".")
        if part and (part != "value" or name.startswith(_OTHERS)):
            return True
        if setup.algorithm == "maddpg" and not options.num_cells:
            return False  # Not of `hidden_size`, the width of the joint critic.
        return super().ignores(setting, setup, options)

    def _set_noise(self) -> None:
        """Make the standard deviation of actions constant, for good.

        The loss does not depend on it, so the gradient of these weights is always 0.
        """
        for name in self.names:
            *_, layer = layers_of(self._of(self.policy, name))
            tensors = stacked_tensors(layer)
            size = tensors["bias"].shape[1] // 2
            tensors["weight"][:, size:] = 0.0
            tensors["bias"][:, size:] = LocScale.output_of(self.value.noise)

    @override
    def explore(self) -> Metrics:
        self._set_noise()
        return {}

    @override
    def remember(self, batch: TensorDictBase) -> int:
        acts, follows = acting(batch, self.names)
        team = self.options.reward == "team"
        rewards = training_rewards(batch, self.description, team=team)
        data = {}
        for name in self.names:
            agents = self._experience(
                batch, name, rewards[name], acts[name], follows[name]
            )
            for column, tensor in agents.items():
                data[f"{name} {column}"] = tensor
            data[f"{name} action"] = batch[name, "action"]
        for index, key in enumerate(self.inputs):
            data[f"now_{index}"] = batch[key]
            data[f"after_{index}"] = batch["next"][key]
        ends = batch["next", "done"].squeeze(-1)
        return self.replay.extend(data, ends, trajectory_ids(batch))

    @override
    def loss(self, minibatch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the critic's squared errors minus the values of the policy's actions.

        Each is a mean over the agents of a group that act, summed over groups.

        Args:
            minibatch: ``[S, 1]`` from the replay buffer.
        """
        rows = {name: column.squeeze(1) for name, column in minibatch.items()}
        now, after = (
            TensorDict(
                {key: rows[f"{when}_{i}"] for i, key in enumerate(self.inputs)},
                batch_size=rows["inside"].shape,
            )
            for when in ("now", "after")
        )
        groups = {
            name: {column: rows[f"{name} {column}"] for column in _EXPERIENCE}
            for name in self.names
        }
        acts = {name: group["acts"].unsqueeze(-1) for name, group in groups.items()}
        taken = {name: rows[f"{name} action"] * acts[name] for name in self.names}
        with torch.no_grad():
            next_actions = self._actions(self.target["policy"], after)
            following = {
                name: action * groups[name]["follows"].unsqueeze(-1)
                for name, (action, _) in next_actions.items()
            }
        policy, critic = self.networks["policy"], self.networks["critic"]
        losses = []
        for name, group in groups.items():
            with torch.no_grad():
                next_value = self._values(self.target["critic"], name, after, following)
                reward = self._scaled(name, group["reward"])
                goal = reward + group["discount"] * next_value  # 0 where none follows.
            error = (self._values(critic, name, now, taken) - goal).square()
            losses.append(_mean(error, group["counts"]))
        critic_loss = torch.stack(losses).sum()
        critic.requires_grad_(requires_grad=False)  # For what the policy's loss reads.
        losses = []
        for name, (action, size) in self._actions(policy, now).items():
            value = self._values_of_own(name, now, taken, action * acts[name])
            penalty = self.value.action_penalty * size.square().mean(-1)
            losses.append(_mean(penalty - value, groups[name]["acts"]))
        critic.requires_grad_(requires_grad=True)
        objective = torch.stack(losses).sum()
        metrics = dict(zip(self.losses, (critic_loss, objective), strict=True))
        return critic_loss + objective, {k: v.detach() for k, v in metrics.items()}

    def _of(self, module: Any, name: str) -> Any:
        """Return the part of a policy or critic for a group."""
        if len(self.names) == 1:
            return module
        return list(module.module.children())[self.names.index(name)]

    def _actions(
        self, policy: nn.Module, frames: TensorDictBase
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the actions ``[S, n, k]`` by group, and these before squashing."""
        dists = {name: self._of(policy, name).get_dist(frames) for name in self.names}
        return {n: (dist.deterministic_sample, dist.loc) for n, dist in dists.items()}

    def _values(
        self,
        critic: nn.Module,
        name: str,
        frames: TensorDictBase,
        actions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the values ``[*B, n]`` of a group's agents, given all actions."""
        frames = frames.clone(recurse=False)
        for other, action in actions.items():
            frames[other, "action"] = action
        out: Tensor = self._of(critic, name)(frames)[name, "state_action_value"]
        return out.squeeze(-1)

    def _values_of_own(
        self,
        name: str,
        frames: TensorDictBase,
        taken: Mapping[str, Tensor],
        own: Tensor,
    ) -> Tensor:
        """Return the values ``[S, n]`` if each agent alone changes its action."""
        critic = self.networks["critic"]
        if not self.central:
            return self._values(critic, name, frames, {**taken, name: own})
        n = own.shape[-2]
        alone = torch.eye(n, dtype=torch.bool, device=own.device)[:, None, :, None]
        actions = {k: a.expand(n, *a.shape) for k, a in taken.items()}
        actions[name] = torch.where(alone, own, taken[name])
        values = self._values(critic, name, frames.expand(n, *frames.shape), actions)
        return values.diagonal(dim1=0, dim2=-1)


def _mean(x: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over the rows that count."""
    return (x * counts).sum() / counts.sum().clamp_min(1)
