"""IQL, VDN and QMIX: values of actions, trained off-policy in plain PyTorch.

Sources:
    Independent Q-learning: Tan, "Multi-Agent Reinforcement Learning: Independent vs.
    Cooperative Agents", ICML 1993. VDN: Sunehag et al., "Value-Decomposition Networks
    for Cooperative Multi-Agent Learning", arXiv 1706.05296. QMIX: Rashid et al., arXiv
    1803.11485.
    van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", arXiv
    1509.06461.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.core.description import EnvDescription
from marl_collect.core.torch_defaults import float32_on
from marl_collect.models import QMixer, RecurrentModule, VDNMixer, make_policy
from marl_collect.models.group_network import GroupNetwork, read_leaves
from marl_collect.models.layers.inputs import Leaf, observation_leaves
from marl_collect.models.policy_options import PolicyOptions
from marl_collect.training.advantages import acting, members
from marl_collect.training.learner import (
    Metrics,
    team_reward,
    training_rewards,
    trajectory_ids,
)
from marl_collect.training.off_policy import OffPolicyLearner
from marl_collect.training.options import (
    DDPG_ONLY,
    Setup,
    TrainingOptions,
    ValueOptions,
    network_options,
)


@final
class ValueLearner(OffPolicyLearner):
    """Trains values of each agent's actions, off-policy.

    IQL learns each agent's value from the agent's reward; VDN and QMIX learn a mixture
    of the agents' values from the team's. Agents that do not act contribute 0 to the
    mixture. QMIX's mixer reads the observations of all agents, so the environment need
    not have a state.

    Recurrent networks are trained on whole episodes, from the first frame on, so that
    their states belong to the weights that are trained.
    """

    online: "ActionValues"
    target: "ActionValues"

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
            TypeError: if there are several groups, or actions are not Discrete, or no
                network reads the observations.
            ValueError: if recurrent networks shall be trained on frames, or if training
                would never begin.
        """
        super().__init__(description, setup, options, seed)
        if options.last_action:
            # What the collector does at random is not handed to the next frame.
            self.warm_up_frames = None
        self.policy_options |= {
            "epsilon": self._epsilon_after(0),
            "return_log_prob": False,
        }
        self.name, *others = description.groups
        self.group = description.groups[self.name]
        if others:
            raise TypeError(
                f"{setup.algorithm} learns the values of one group, but there are "
                f"{', '.join(description.groups)}. Use ippo or mappo, or put all "
                "agents into one group with the environment's group_map."
            )
        if not isinstance(self.group.action, spaces.Discrete):
            raise TypeError(
                f"{setup.algorithm} needs Discrete actions, but {self.name} acts in "
                f"{self.group.action}. Use ippo or mappo."
            )
        if options.recurrent is not None and not self.replay.whole:
            raise ValueError(
                f"recurrent is {options.recurrent!r}, which needs whole episodes, but "
                "value.replay is 'frames'. Use value.replay=auto."
            )
        self.apart = setup.algorithm == "iql"
        """Whether each agent's value is learnt by itself."""
        observed = self.group.observation
        self.leaves = read_leaves(
            self.name, self.group, PolicyOptions(**self.policy_options)
        )
        made: Any = make_policy(description, **self.policy_options)
        self.policy = made.to(self.device)
        self._epsilon: Tensor = made[1].module.epsilon
        mixer: nn.Module | None = None
        if setup.algorithm == "vdn":
            mixer = SumMixer(self.group.n_agents)
        if setup.algorithm == "qmix":
            mixer = ObservationMixer(
                observation_leaves(observed, (self.name, "observation")),
                self.group.n_agents,
                PolicyOptions(
                    **network_options(setup, options, description, centralised=False)
                ),
                self.value,
            ).to(self.device)
        self._copy_to_target(ActionValues(made[0], mixer))
        self.networks = {"policy": self.policy}
        if mixer is not None:
            self.networks["mixer"] = mixer
        self.optimizer = self._adam(self.value.lr)
        self.load_initial()

    @override
    def _replays_episodes(self) -> bool:
        return _whole_episodes(self.options)

    @property
    def values(self) -> nn.Module:
        """The network that reads observations and writes values of actions."""
        return self.online.values

    @property
    def mixer(self) -> nn.Module | None:
        """The network that mixes the values of agents, if the algorithm has one."""
        return self.online.mixer

    @classmethod
    def default_setups(cls, algorithm: str, *, agent_ids: bool) -> list[Setup]:
        """Return the one setup that is compared by default, none of IQL.

        IQL cannot be trained where agents take turns, which the first batch shows.
        """
        return [] if algorithm == "iql" else [Setup(algorithm, agent_ids=agent_ids)]

    @classmethod
    @override
    def ignores(cls, setting: str, setup: Setup, options: TrainingOptions) -> bool:
        if setup.algorithm != "qmix" and setting.startswith("value.mixing_"):
            return True
        if setup.algorithm != "iql" and setting == "reward":
            return True
        if not setup.centralised and setting == "network":
            return True
        other = "frames" if _whole_episodes(options) else "episodes"
        of_others = (f"value.minibatch_{other}", f"value.{other}_per_update")
        if setting in DDPG_ONLY:
            return True
        if setting.startswith("ppo.") or setting in of_others:
            return True
        return super().ignores(setting, setup, options)

    @override
    def explore(self) -> Metrics:
        epsilon = self._epsilon_after(self.frames)
        self._epsilon.fill_(epsilon)
        return {"epsilon": epsilon}

    def _epsilon_after(self, frames: int) -> float:
        """Return the probability of a random action after so many frames."""
        if self.warm_up_frames is None and frames < self.value.warm_up_frames:
            return 1.0
        share = min(1.0, frames / self.value.epsilon_frames)
        start, end = self.value.epsilon_start, self.value.epsilon_end
        return start + share * (end - start)

    @override
    def remember(self, batch: TensorDictBase) -> int:
        """Add what training reads of a batch ``[B, T]`` to the replay buffer.

        Returns:
            The number of episodes that end in the batch.

        Raises:
            NotFiniteError: if a reward is not finite.
            ValueError: if IQL's agents wait for their turn, or if the buffer has no
                room for an episode.
        """
        acts, follows = (masks[self.name] for masks in acting(batch, [self.name]))
        after = batch["next", self.name]
        if not self.options.bootstrap_limits:
            follows = follows & ~after["done"].squeeze(-1)
        team = self.apart and self.options.reward == "team"
        reward = training_rewards(batch, self.description, team=team)[self.name]
        if self.apart:
            data = self._experience(batch, self.name, reward, acts, follows)
        else:
            end = "terminated" if self.options.bootstrap_limits else "done"
            ended = batch["next", end]
            counts = ended | follows.any(-1, keepdim=True)
            counts = counts & members(batch, self.name).any(-2)
            reward = team_reward(batch, self.description)
            self._note_rewards(self.name, reward)
            data = {
                "acts": acts,
                "follows": follows,
                "reward": reward,
                "discount": self.options.gamma * ~ended,
                # Nothing is known of a frame in which a time limit ends the episode
                # while agents wait.
                "counts": counts.to(reward.dtype),
            }
        action = batch[self.name, "action"]
        data["action"] = action.argmax(-1) if self.group.one_hot else action
        for index, leaf in enumerate(self.leaves):
            data[f"now_{index}"] = batch[leaf.key]
            data[f"after_{index}"] = batch["next"][leaf.key]
        if self.group.action_mask:
            data["legal"] = after["action_mask"]
        ends = batch["next", "done"].squeeze(-1)
        return self.replay.extend(data, ends, trajectory_ids(batch))

    def loss(self, minibatch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean squared error of the values, over what can be learnt.

        Args:
            minibatch: ``[S, T]`` from the replay buffer.
        """
        now, after = (
            [minibatch[f"{when}_{index}"] for index in range(len(self.leaves))]
            for when in ("now", "after")
        )
        values, judged, following = self._unrolled_values(now, after)
        chosen = values.gather(-1, minibatch["action"].unsqueeze(-1)).squeeze(-1)
        value = self.online.mix(chosen * minibatch["acts"], now)
        with torch.no_grad():
            if "legal" in minibatch:
                judged = judged.masked_fill(~minibatch["legal"], float("-inf"))
            best = following.gather(-1, judged.argmax(-1, keepdim=True)).squeeze(-1)
            following = self.target.mix(best * minibatch["follows"], after)
            reward = self._scaled(self.name, minibatch["reward"])
            goal = reward + minibatch["discount"] * following
            counts = minibatch["counts"] * minibatch["inside"].unsqueeze(-1)
        error = ((value - goal).square() * counts).sum() / counts.sum().clamp_min(1)
        return error, {"loss": error.detach()}

    def _unrolled_values(
        self, now: list[Tensor], after: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values of actions ``[S, T, n, actions]``.

        Returns:
            Those before each frame, and, without gradients, those after it: of the
            network that chooses the next actions, and of the target network.
        """
        double = self.value.double_q
        if self.options.recurrent is None:
            values = self.online(now)
            with torch.no_grad():
                following = self.target(after)
                judged = self.online(after) if double else following
            return values, judged, following
        # An episode's first observation, and those after each frame.
        path = [
            torch.cat([first[:, :1], rest], 1)
            for first, rest in zip(now, after, strict=True)
        ]
        online = self.online(path)
        with torch.no_grad():
            following = self.target(path)[:, 1:]
        judged = online[:, 1:].detach() if double else following
        return online[:, :-1], judged, following


@final
class ActionValues(nn.Module):
    """Values of the actions of a group, and their mixture.

    Args:
        values: a policy's module that writes the values of actions.
        mixer: maps values ``[*B, n, 1]`` and observations to ``[*B, 1]``; ``None`` if
            values are not mixed.
    """

    def __init__(self, values: nn.Module, mixer: nn.Module | None) -> None:
        super().__init__()
        self.values = values
        self.mixer = mixer

    def forward(self, observations: Sequence[Tensor]) -> Tensor:
        """Map arrays ``[S, T, n, *shape]`` to values ``[S, T, n, actions]``.

        A recurrent network begins with zeros and remembers the earlier frames.
        """
        module: Any = self.values
        if isinstance(module, RecurrentModule):
            encoded = module.encoder(*observations)
            values: Tensor = module.decoder(module.network(encoded, sequence=True)[0])
        else:
            values = module.module(*observations)
        return values

    def mix(self, values: Tensor, observations: Sequence[Tensor]) -> Tensor:
        """Map values ``[*B, n]`` to the mixture ``[*B, 1]``, if there is a mixer."""
        if self.mixer is None:
            return values
        mixture: Tensor = self.mixer(values.unsqueeze(-1), *observations)
        return mixture


@final
class SumMixer(nn.Module):
    """VDN's mixer, which does not read the observations."""

    def __init__(self, n_agents: int) -> None:
        super().__init__()
        self.mixer = VDNMixer(n_agents)

    def forward(self, chosen: Tensor, *observations: Tensor) -> Tensor:
        """Mix values ``[*B, n, 1]`` into ``[*B, 1]``."""
        del observations
        out: Tensor = self.mixer(chosen)
        return out


@final
class ObservationMixer(nn.Module):
    """QMIX's mixer, whose weights depend on the normalised observations of all agents.

    Args:
        leaves: the arrays of the observation. Images go through convolutions first.
        n_agents: number of agents.
        options: of the convolutions.
        value: units and initial weights of the mixer.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        n_agents: int,
        options: PolicyOptions,
        value: ValueOptions,
    ) -> None:
        super().__init__()
        width = 0

        def code(n_inputs: int) -> nn.Module:
            nonlocal width
            width = n_inputs
            if all(leaf.kind != "image" for leaf in leaves):
                return nn.Identity()
            width = value.mixing_cells
            return nn.Sequential(nn.Linear(n_inputs, width), nn.ReLU())

        shared = replace(options, share_params=True, agent_ids=False)
        self.n_leaves = len(leaves)
        self.encoder = GroupNetwork(leaves, n_agents, shared, code)
        self.norm = value.mixing_norm
        self.mixer = QMixer(
            (n_agents * width,),
            value.mixing_cells,
            n_agents,
            hypernet_embed_dim=value.mixing_hyper_cells,
        )
        # QMIX's mixer multiplies the agents' values by functions of the state. With the
        # default initialisation, each value counts several times in the team's value.
        # The overestimation by the maximum over actions then grows with every target:
        # on simple_spread, values diverged.
        with torch.no_grad():
            for layer in self.mixer.modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.mul_(value.mixing_gain)

    def forward(self, chosen: Tensor, *observations: Tensor) -> Tensor:
        """Mix values ``[*B, n, 1]`` into ``[*B, 1]``.

        Last actions and flags may follow the arrays of the observation; they are not
        read.
        """
        state = self.encoder(*observations[: self.n_leaves]).flatten(-2)
        # The weights of the mixture are linear in the state, in two layers. Without a
        # bound, states far from the others get values that are too high, the targets
        # spread them, and returns fall: on simple_spread after 60,000 frames.
        if self.norm:
            state = nn.functional.layer_norm(state, state.shape[-1:])
        out: Tensor = self.mixer(chosen, state)
        return out


def _whole_episodes(options: TrainingOptions) -> bool:
    """Return whether minibatches consist of whole episodes."""
    if options.value.replay == "auto":
        return options.recurrent is not None
    return options.value.replay == "episodes"
