"""VDN and QMIX, with TorchRL's loss, target updates and replay buffer.

Sources:
    Sunehag et al., "Value-Decomposition Networks for Cooperative Multi-Agent Learning",
    arXiv 1706.05296; Rashid et al., "QMIX", arXiv 1803.11485.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.torch_defaults import float32_on
from marl_collect.errors import imports_of
from marl_collect.models import QMixer, VDNMixer, make_policy
from marl_collect.models.group_network import GroupNetwork
from marl_collect.models.layers.inputs import Leaf, observation_leaves
from marl_collect.models.policy_options import PolicyOptions
from marl_collect.training.advantages import acting
from marl_collect.training.learner import (
    Learner,
    Metrics,
    team_reward,
    write_rewards,
)
from marl_collect.training.options import (
    Setup,
    TrainingOptions,
    ValueOptions,
    network_options,
)


@final
class ValueLearner(Learner):
    """Trains values of each agent's actions, mixed into a team value, off-policy.

    Agents that do not act contribute 0 to the mixture. QMIX's mixer reads the
    observations of all agents, so the environment need not have a state.
    """

    every_task = False  # One group with Discrete actions.

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
            ValueError: if the networks shall be recurrent.
        """
        super().__init__(description, setup, options, seed)
        with imports_of("torchrl", setup.name):
            from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
            from torchrl.objectives import SoftUpdate, ValueEstimators

        torch.manual_seed(seed)
        self.value = options.value
        self.prefetch = options.value.prefetch
        self.warm_up_frames = options.value.warm_up_frames
        self.policy_options |= {
            "epsilon": options.value.epsilon_start,
            "return_log_prob": False,
        }
        self.name, self.group = _only_group(description)
        if options.recurrent is not None:
            raise ValueError(
                f"{setup.name} has no recurrent networks, but recurrent is "
                f"{options.recurrent!r}. Use ippo or mappo."
            )
        if options.frames < self.value.warm_up_frames:
            raise ValueError(
                f"frames is {options.frames}, but training begins after "
                f"value.warm_up_frames={self.value.warm_up_frames}. Raise one or lower "
                "the other."
            )
        shared = PolicyOptions(
            centralised=setup.centralised,
            **network_options(setup, options, description),
        )
        n_agents = self.group.n_agents
        self.leaves = observation_leaves(
            self.group.observation, (self.name, "observation")
        )
        made: Any = make_policy(description, **self.policy_options)
        self.policy = made.to(self.device)
        self.values = made[0]
        """Reads observations and writes values of actions."""
        self._epsilon: Tensor = made[1].module.epsilon
        self.mixer: nn.Module = VDNMixer(n_agents)
        if setup.algorithm == "qmix":
            self.mixer = ObservationMixer(self.leaves, n_agents, shared, self.value)
            self.mixer.to(self.device)
        self.networks = {"policy": self.policy, "mixer": self.mixer}
        self.optimizer = self._adam(self.value.lr)
        self._loss = self._make_loss()
        self._loss.make_value_estimator(ValueEstimators.TD0, gamma=options.gamma)
        SoftUpdate(self._loss, tau=self.value.tau)  # Without one, TorchRL warns.
        self._trained = self._weights("")
        self._targets = self._weights("target_")
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(self.value.buffer_frames, device=self.device)
        )

    @classmethod
    def default_setups(cls, algorithm: str, *, agent_ids: bool) -> list[Setup]:
        """Return the one setup that is compared by default."""
        return [Setup(algorithm, agent_ids=agent_ids)]

    @classmethod
    @override
    def ignores(cls, setting: str, setup: Setup, options: TrainingOptions) -> bool:
        if setup.algorithm == "vdn" and setting.startswith("value.mixing_"):
            return True  # Its mixer is a sum.
        return setting.startswith("ppo.") or setting == "reward"

    @property
    def unrolled(self) -> dict[str, nn.Module]:
        """The loss, which contains the target networks."""
        return {"loss": self._loss}

    @float32_on("cpu")
    def update(self, batch: TensorDictBase, progress: float) -> Metrics:
        """Add the batch to the replay buffer and train on samples from it."""
        self.note_first_ends(batch)
        data = self.prepare(batch)
        self._buffer.extend(data)
        frames = progress * self.options.frames
        share = min(1.0, frames / self.value.epsilon_frames)
        start, end = self.value.epsilon_start, self.value.epsilon_end
        epsilon = start + share * (end - start)
        self._epsilon.fill_(epsilon)
        if frames < self.value.warm_up_frames:
            return {"loss": float("nan"), "grad_norm": 0.0, "epsilon": epsilon}
        steps = max(1, len(data) // self.value.frames_per_update)
        losses = norms = 0.0
        for _ in range(steps):
            loss, _logged, norm = self._step(self._sample(), self.value.max_grad_norm)
            norms += norm
            losses += float(loss)
            # One call for all networks. Both lists view the memory of the networks.
            torch._foreach_lerp_(self._targets, self._trained, self.value.tau)
        return {"loss": losses / steps, "grad_norm": norms / steps, "epsilon": epsilon}

    def _weights(self, prefix: str) -> list[Tensor]:
        """Return the loss's trained weights, or those of its targets, in one order."""
        names = ("local_value_network_params", "mixer_network_params")
        weights = [getattr(self._loss, prefix + name) for name in names]
        return [w.data for params in weights for w in params.values(True, True)]

    def _sample(self) -> TensorDictBase:
        # The buffer itself would draw on the learner's device: other frames on a GPU.
        count, size = len(self._buffer), self.value.minibatch_frames
        drawn = torch.randint(count, (size,), generator=self.generator, device="cpu")
        return cast("TensorDictBase", self._buffer[drawn.to(self.device)])

    def prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the data for the loss, ``[B * T]`` or less.

        Frames are left out whose next value no agent has: those in which a time limit
        ends the episode while agents wait for their turn.
        """
        flat = batch.reshape(-1)
        _acts, follows = acting(flat, [self.name])
        ended = flat["next", "terminated"]
        flat = flat[(ended | follows[self.name].any(-1, keepdim=True)).squeeze(-1)]
        follows = acting(flat, [self.name])[1]
        root = self._observed(flat)
        root[self.name, "action"] = flat[self.name, "action"]
        after = self._observed(flat["next"])
        if self.group.mask:
            # A time limit stops an agent, but its next state still has a value.
            after[self.name, "mask"] = follows[self.name]
        scale = self.options.reward_scale
        write_rewards(flat, self.description, team=False, scale=scale)
        after["reward"] = team_reward(flat, self.description)
        for flag in ("done", "terminated"):
            after[flag] = flat["next", flag]
        root["next"] = after
        return root.to(self.device)

    def loss(self, minibatch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the squared error of the team's value."""
        loss = self._loss(minibatch)["loss"]
        return loss, {"loss": loss.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs, including the buffer.

        Only rows with data are included, not the buffer's whole capacity.
        """
        count = len(self._buffer)
        rows = {}
        if count:  # A slice would be saved with all of its storage.
            filled = self._buffer.storage[:count]
            part = count < self.value.buffer_frames
            rows = {
                key: tensor.clone() if part else tensor
                for key, tensor in filled.items(include_nested=True, leaves_only=True)
            }
        writer = self._buffer.writer.state_dict()
        return super().state_dict() | {"buffer": {"rows": rows, "writer": writer}}

    @float32_on("cpu")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``, including the buffer."""
        rows = state["buffer"]["rows"]
        if rows:
            count = len(next(iter(rows.values())))
            filled = TensorDict(rows, [count]).to(self.device)
            self._buffer.storage.set(torch.arange(count, device="cpu"), filled)
        self._buffer.writer.load_state_dict(state["buffer"]["writer"])
        super().load_state_dict(state)

    def _observed(self, flat: TensorDictBase) -> TensorDict:
        keys = ("observation", "mask", "action_mask")
        selected = flat[self.name].select(*keys, strict=False)
        return TensorDict({self.name: selected}, flat.batch_size)

    def _make_loss(self) -> Any:
        from torchrl.modules import QValueModule
        from torchrl.objectives.multiagent import QMixerLoss

        name = self.name
        qmix = self.setup.algorithm == "qmix"
        chosen = (name, "chosen_action_value")
        best = QValueModule(
            action_value_key=(name, "action_value"),
            action_mask_key=(name, "action_mask") if self.group.action_mask else None,
            out_keys=[(name, "action"), (name, "action_value"), chosen],
            action_space="categorical",
        )
        mixer = TensorDictModule(
            _ActingMixer(self.mixer, masked=self.group.mask),
            in_keys=[chosen, *([(name, "mask")] if self.group.mask else [])]
            + ([leaf.key for leaf in self.leaves] if qmix else []),
            out_keys=["team_value"],
        )
        loss = QMixerLoss(
            TensorDictSequential(self.values, best),
            mixer,
            delay_value=True,
            action_space="categorical",
        )
        loss.set_keys(
            action=(name, "action"),
            action_value=(name, "action_value"),
            local_value=chosen,
            global_value="team_value",
        )
        return loss


@final
class _ActingMixer(nn.Module):
    """Leaves agents that do not act out of the mixture."""

    def __init__(self, mixer: nn.Module, *, masked: bool) -> None:
        super().__init__()
        self.mixer = mixer
        self.masked = masked

    def forward(self, chosen: Tensor, *others: Tensor) -> Tensor:
        """Mix values ``[*B, n, 1]`` into ``[*B, 1]``."""
        if self.masked:
            mask, *others = others  # type: ignore[assignment]
            chosen = chosen * mask.unsqueeze(-1)
        out: Tensor = self.mixer(chosen, *others)
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
        self.encoder = GroupNetwork(leaves, n_agents, shared, code)
        self.mixer = QMixer((n_agents * width,), value.mixing_cells, n_agents)
        _shrink(self.mixer, value.mixing_gain)

    def forward(self, chosen: Tensor, *observations: Tensor) -> Tensor:
        """Mix values ``[*B, n, 1]`` into ``[*B, 1]``."""
        state = self.encoder(*observations).flatten(-2)
        # The weights of the mixture are linear in the state, in two layers. Without a
        # bound, states far from the others get values that are too high, the targets
        # spread them, and returns fall: on simple_spread after 60,000 frames.
        state = nn.functional.layer_norm(state, state.shape[-1:])
        out: Tensor = self.mixer(chosen, state)
        return out


def _shrink(mixer: nn.Module, gain: float) -> None:
    """Multiply the weights of a mixer's layers by ``gain``, but not their biases.

    QMIX's mixer multiplies the agents' values by functions of the state. With the
    default initialisation, each value counts several times in the team's value. The
    overestimation by the maximum over actions then grows with every target: on
    simple_spread, values diverged.
    """
    with torch.no_grad():
        for layer in mixer.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(gain)


def _only_group(description: EnvDescription) -> tuple[str, GroupDescription]:
    name, *others = description.groups
    group = description.groups[name]
    acted = group.action
    if others:
        raise TypeError(
            "Value decomposition mixes one group, but there are "
            f"{', '.join(description.groups)}. Use ippo or mappo, or put all agents "
            "into one group with the environment's group_map."
        )
    if not isinstance(acted, spaces.Discrete):
        raise TypeError(
            f"VDN and QMIX need Discrete actions, but {name} acts in {acted}. "
            "Use ippo or mappo."
        )
    return name, group
