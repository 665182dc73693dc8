"""IPPO, MAPPO, IA2C and MAA2C in plain PyTorch.

Sources:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv 1707.06347.
    IPPO: de Witt et al., "Is Independent Learning All You Need in the StarCraft
    Multi-Agent Challenge?", arXiv 2011.09533.
    MAPPO: Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent
    Games", arXiv 2103.01955: also Huber's loss, clipped and normalised values.
    Papoudakis et al., "Benchmarking Multi-Agent Deep Reinforcement Learning Algorithms
    in Cooperative Tasks", arXiv 2006.07869: also returns of n steps, target critics,
    IA2C and MAA2C.
    PopArt: van Hasselt et al., "Learning values across many orders of magnitude", arXiv
    1602.07714. Its moments are moving averages; here they are those of all returns.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.buffers.layout import TRAJ_IDS, VALID
from marl_collect.core.description import EnvDescription
from marl_collect.core.signature import ACTS, MEMBER
from marl_collect.core.tensordicts import key_path, take_rows
from marl_collect.core.torch_defaults import float32_on
from marl_collect.models import (
    CrossGroupCritic,
    RecurrentModule,
    make_critic,
    make_policy,
    set_recurrent_mode,
)
from marl_collect.models.last_action import LAST_ACTION
from marl_collect.models.layers.linear import AgentLayer
from marl_collect.training.advantages import TRAINED, acting, write_advantages
from marl_collect.training.learner import (
    Learner,
    Metrics,
    each_once,
    follow,
    training_rewards,
    trajectory_ids,
)
from marl_collect.training.options import Setup, TrainingOptions, network_options

_OBSERVED_AT_ONCE = 8_000_000
"""Bytes of observations in one pass of the critic. Activations take about 25 times as
much for pictures of bytes and the default convolutions."""


_ACTOR_CRITIC = ("ia2c", "maa2c")
_JOINT_CRITIC = ("mappo", "maa2c")
_GAINS = {
    "relu": nn.init.calculate_gain("relu"),
    "tanh": nn.init.calculate_gain("tanh"),
    "elu": 1.0,  # PyTorch has none.
}


@final
class PPOLearner(Learner):
    """Trains a policy and a critic for all groups, with one clipped loss per group.

    Rows of agents that do not act, and decisions whose outcome is not known, are left
    out of the losses, and of the mean and the standard deviation that normalise the
    advantages.

    IA2C and MAA2C take one gradient step per batch, without clipping, and are
    otherwise the same.
    """

    skips_padding = True

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
            ValueError: if options contradict each other.
        """
        super().__init__(description, setup, options, seed)
        torch.manual_seed(seed)
        self.ppo = options.ppo
        self._once = setup.algorithm in _ACTOR_CRITIC
        """Whether each batch is learnt from in a single step."""
        self.prefetch = options.ppo.prefetch
        self.episodes_per_batch = options.ppo.episodes_per_batch
        self._check_episodes()
        self.policy = make_policy(description, **self.policy_options).to(self.device)
        cells = self.ppo.critic_num_cells
        judges = replace(
            options,
            recurrent=options.recurrent if self.ppo.recurrent_critic else None,
            num_cells=options.num_cells if cells is None else cells,
        )
        of_critic = network_options(
            setup, judges, description, centralised=setup.algorithm in _JOINT_CRITIC
        )
        self.critic = make_critic(description, **of_critic).to(self.device)
        if self.ppo.orthogonal:
            gain = _GAINS[options.activation]
            for name in description.groups:
                _orthogonalise(self._policy_of(name), gain, last=self.ppo.policy_gain)
            _orthogonalise(self.critic, gain)
        self._values = list(self.critic.out_keys)
        self._states: dict[int, dict[Any, Tensor]] = {}
        """The critic's states after the last batch, by index of the environment."""
        self.networks = {"policy": self.policy, "critic": self.critic}
        self.optimizer = self._adam(self.ppo.lr, self.ppo.adam_eps)
        self.target: nn.Module | None = None
        """The target critic, if there is one."""
        if self.ppo.target_tau is not None:
            if options.recurrent is not None and self.ppo.recurrent_critic:
                raise ValueError(
                    f"ppo.target_tau is {self.ppo.target_tau}, but a target critic "
                    f"cannot have memory and recurrent is {options.recurrent!r}. Use "
                    "ppo.recurrent_critic=false."
                )
            self.target = copy.deepcopy(self.critic).requires_grad_(requires_grad=False)
        self.load_initial()

    def _check_episodes(self) -> None:
        """Raise ValueError if batches of whole episodes cannot be collected."""
        episodes, options = self.ppo.episodes_per_batch, self.options
        if episodes is None:
            return
        if self.ppo.prefetch:
            raise ValueError(
                f"ppo.episodes_per_batch is {episodes}, whose episodes begin with the "
                "newest weights, but ppo.prefetch collects with older ones. Use "
                "ppo.prefetch=false."
            )
        environments = options.workers * options.envs_per_worker
        if episodes % environments:
            raise ValueError(
                f"ppo.episodes_per_batch is {episodes}, but {environments} "
                f"environments (workers={options.workers}, envs_per_worker="
                f"{options.envs_per_worker}) cannot contribute equally many episodes. "
                "Use a multiple of their number, or another number of them."
            )

    @classmethod
    @override
    def default_setups(cls, algorithm: str, *, agent_ids: bool) -> list[Setup]:
        if algorithm in _ACTOR_CRITIC:  # Of interest with the settings of a paper.
            return []
        return super().default_setups(algorithm, agent_ids=agent_ids)

    @classmethod
    @override
    def ignores(cls, setting: str, setup: Setup, options: TrainingOptions) -> bool:
        ppo, joint = options.ppo, setup.algorithm in _JOINT_CRITIC
        cells = ppo.critic_num_cells
        cells = options.num_cells if cells is None else cells
        memory = options.recurrent is not None
        read = {
            "network": setup.centralised or joint,
            # A joint critic without hidden layers has this width.
            "hidden_size": memory or (joint and not cells),
            "ppo.policy_gain": ppo.orthogonal,
            "ppo.popart": ppo.normalise_values,
            "ppo.lmbda": ppo.n_steps is None,
            "ppo.sequence_frames": memory,
            "ppo.recurrent_critic": memory,
        }
        if setting in read:
            return not read[setting]
        repeated = ("epochs", "minibatch_frames", "clip_epsilon", "clip_value")
        single = setup.algorithm in _ACTOR_CRITIC
        if single and setting.removeprefix("ppo.") in repeated:
            return True
        return setting.startswith("value.")

    @override
    def learn(self, batch: TensorDictBase, progress: float) -> Metrics:
        share = 1 - progress if self.ppo.anneal else 1
        rates = (self.ppo.lr, self.ppo.critic_lr or self.ppo.lr)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = share * rate
        data, states = self._prepared(batch)
        self._states |= states
        size = max(1, self.ppo.minibatch_frames // data[:1].numel())
        epochs = self.ppo.epochs
        if self._once:
            size, epochs = len(data), 1
        # Read here, so that no minibatch has to wait for a device.
        trains = {
            name: data[name, TRAINED].flatten(1).any(1).cpu()
            for name in self.description.groups
        }
        steps = []
        for _ in range(epochs):
            order = torch.randperm(len(data), generator=self.generator, device="cpu")
            # Equal parts: Adam's step on a few frames that remain would be as large.
            for rows in order.tensor_split(-(-len(data) // size)):
                idle = [(g, TRAINED) for g, s in trains.items() if not s[rows].any()]
                if len(idle) == len(trains):
                    continue
                minibatch = take_rows(data, rows.to(self.device)).exclude(*idle)
                steps.append(
                    self._step(
                        minibatch, self.ppo.max_grad_norm, apart=self.ppo.clip_apart
                    )
                )
        if self.target is not None and self.ppo.target_tau is not None:
            follow(self.target, self.critic, self.ppo.target_tau)
        return self._means(steps) | {"lr": share * self.ppo.lr}

    @property
    @override
    def untrained(self) -> dict[str, nn.Module]:
        """The target critic, if there is one."""
        return {} if self.target is None else {"target_critic": self.target}

    @override
    def synchronise(self) -> None:
        if self.target is not None:
            self.target.load_state_dict(self.critic.state_dict())

    def prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Estimate advantages and return the data for the loss.

        ``advantages.py`` has the rule for agents that wait or died.

        Returns:
            Frames ``[N]``, or sequences ``[S, sequence_frames]`` with their first
            states if the networks are recurrent.

        Raises:
            ValueError: if no decision in the batch has a known outcome, or if actions
                are random.
        """
        return self._prepared(batch)[0]

    def _prepared(
        self, batch: TensorDictBase
    ) -> tuple[TensorDictBase, dict[int, dict[Any, Tensor]]]:
        """Return the data for the loss, and the critic's states after the batch."""
        self._check_chosen(batch)
        recurrent = self.options.recurrent is not None
        length = min(self.ppo.sequence_frames, batch.shape[1]) if recurrent else 1
        data = batch.select(*self._inputs(batch)).to(self.device)
        data, inside = _filled(data, batch.get(VALID, None), length)
        team = self.options.reward == "team"
        rewards = training_rewards(data, self.description, team=team)
        for name, reward in rewards.items():
            once = each_once(reward[inside], data[name, "done"][inside], team=team)
            self._note_rewards(name, once)
            data["next", name, "reward"] = self._scaled(name, reward)
        with torch.no_grad():
            states = self._write_values(data, inside)
            judged = data
            if self.target is not None:
                judged = data.copy()
                for td in (judged, judged["next"]):
                    self._criticise(self.target, td, self._frames_at_once(data))
            write_advantages(data, judged, inside, self.description, self.options)
        for name in self.description.groups if self.ppo.normalise_values else ():
            mean, deviation = self._unit(name)
            output = (data[name, "state_value"] - mean) / deviation
            targets = data[name, "value_target"][data[name, TRAINED]]
            self._moments["return", name].add(targets)
            # A target critic only follows the critic, so nothing else would tell it.
            self._preserve_values(name, mean, deviation)
            if self.ppo.popart:
                continue
            # In the unit of the values to come: what is clipped is the output.
            mean, deviation = self._unit(name)
            data[name, "state_value"] = mean + deviation * output
        if not any(data[name, TRAINED].any() for name in self.description.groups):
            raise ValueError(
                f"No action in the batch has a known outcome: with {batch.shape[1]} "
                "frames per environment, no agent gets its next turn in the same "
                "batch. Raise frames_per_batch, or use fewer environments."
            )
        data = data.exclude("next", "collector")
        data = data.reshape(-1, length) if recurrent else data.reshape(-1)
        begins = inside.reshape(-1, length)[:, 0]
        if not begins.all():
            data = take_rows(data, begins.nonzero().squeeze(-1))
        return data, states

    def _check_chosen(self, batch: TensorDictBase) -> None:
        """Check that the policy chose the actions.

        Collectors write zeros for what it would have written in frames of random
        actions. Of trajectories, these frames are the first ones. A log-probability of
        0 alone may be that of the only legal action.

        Raises:
            ValueError: if actions are random; says what to change.
        """
        keys = batch.keys(include_nested=True)
        policy: Any = self.policy
        outputs = [key for key in policy.out_keys if key in keys]
        outputs = [key for key in outputs if key[-1] != "action"]
        if all(key[-1] == "action_log_prob" for key in outputs):
            return
        wrote = torch.stack([(batch[key] != 0).flatten(2).any(-1) for key in outputs])
        acts, _ = acting(batch, list(self.description.groups))
        chosen, decided = wrote.any(0), torch.cat(list(acts.values()), -1).any(-1)
        valid = batch.get(VALID, torch.ones_like(chosen))
        if not (valid & chosen).any() or (valid & decided & ~chosen)[:, 0].any():
            raise ValueError(
                f"{self.setup.name} learns from actions that its policy chose, but "
                "some of this batch are random, so their log-probabilities are not "
                "known. Omit init_random_frames, or do not learn from its frames."
            )

    def _write_values(
        self, data: TensorDictBase, inside: Tensor
    ) -> dict[int, dict[Any, Tensor]]:
        """Write values at the root and under ``next``.

        For a recurrent critic, also write its state before each frame.

        Returns:
            The critic's state after the last frame of each environment, by its index.
        """
        at_once = self._frames_at_once(data)
        modules = [m for m in self.critic.modules() if isinstance(m, RecurrentModule)]
        if not modules:
            self._criticise(self.critic, data, at_once)
            self._criticise(self.critic, data["next"], at_once)
            return {}
        shapes = {k: s for m in modules for k, s in m.state_shapes.items()}
        environments = (data[TRAJ_IDS][:, 0] >> 32).tolist()
        before = {}
        for key, shape in shapes.items():
            data[key] = torch.zeros(*data.shape, *shape, device=self.device)
            zeros = {key: data[key][0, 0]}
            states = [self._states.get(index, zeros)[key] for index in environments]
            before[key] = torch.stack([state.to(self.device) for state in states])
        length = min(data.shape[1], at_once)
        outputs: list[TensorDictBase] = []
        for part in data.split(length, 1):
            for key, state in before.items():
                part[key][:, 0] = state
            with set_recurrent_mode():
                rows = part.split(max(1, at_once // length))
                values = [self._values_of(self.critic, row) for row in rows]
                outputs.append(torch.cat(values))
            before = {key: outputs[-1]["next"][key][:, -1] for key in shapes}
        whole: TensorDictBase = torch.cat(outputs, 1)
        data.update(whole)
        for key in shapes:
            data[key][:, 1:] = data["next"][key][:, :-1]
        at = torch.arange(len(data), device=self.device), inside.sum(1) - 1
        after = {key: data["next"][key][at] for key in shapes}
        # Single steps, each from the state before it.
        self._criticise(self.critic, data["next"], at_once)
        # Of several trajectories of an environment, the last one goes on.
        return {
            index: {key: state[row] for key, state in after.items()}
            for row, index in enumerate(environments)
        }

    def _criticise(self, critic: Any, data: TensorDictBase, at_once: int) -> None:
        """Write a critic's outputs for all frames, computed a few at a time."""
        parts = data.reshape(-1).split(at_once)
        outputs = torch.cat([self._values_of(critic, part) for part in parts])
        data.update(outputs.reshape(data.shape))

    def _values_of(self, critic: Any, data: TensorDictBase) -> TensorDictBase:
        """Return a critic's outputs, with values in the unit of returns."""
        out: TensorDictBase = critic(data).select(*self._values, strict=False)
        for name in self.description.groups if self.ppo.normalise_values else ():
            mean, deviation = self._unit(name)
            out[name, "state_value"] = mean + deviation * out[name, "state_value"]
        return out

    def _frames_at_once(self, data: TensorDictBase) -> int:
        """Return how many frames' activations fit into a few hundred megabytes.

        Activations of a whole batch of pictures would take gigabytes.
        """
        frame = data[:1, :1]
        pictures = sum(
            value.nbytes
            for name in self.description.groups
            for key, value in frame[name].items(include_nested=True, leaves_only=True)
            if "observation" in key
        )
        most = _OBSERVED_AT_ONCE // max(1, pictures)
        return max(1, min(self.ppo.minibatch_frames, most))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs, with the critic's states."""
        return super().state_dict() | {"critic_states": dict(self._states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``, with the critic's states."""
        states = dict(state["critic_states"])
        super().load_state_dict(state)
        self._states = states

    def loss(self, minibatch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the groups' losses, and the groups' mean metrics.

        Only trained rows count. Groups without the key ``trained`` are left out.
        """
        ppo, losses, logged = self.ppo, list[Tensor](), dict[str, Tensor]()
        groups = self.description.groups
        active = [name for name in groups if TRAINED in minibatch[name].keys()]
        with set_recurrent_mode(self.options.recurrent is not None):
            values = self._values_of(self.critic, minibatch.copy())
            dists = {
                name: self._policy_of(name).get_dist(minibatch.copy())
                for name in active
            }
        for name, dist in dists.items():
            rows = minibatch[name]
            used, advantage = rows[TRAINED], rows["advantage"].squeeze(-1)
            mean = partial(_mean, used=used, count=used.sum())
            # Other rows have no ratio: where their gradient is infinite, 0 times it
            # would be NaN.
            log_prob = torch.where(used, dist.log_prob(rows["action"]), 0.0)
            log_ratio = torch.where(used, log_prob - rows["action_log_prob"], 0.0)
            ratio = log_ratio.exp()
            if self._once:
                clipped = ratio
                gain = mean(log_prob * advantage)
            else:
                clipped = ratio.clamp(1 - ppo.clip_epsilon, 1 + ppo.clip_epsilon)
                gain = mean(torch.minimum(ratio * advantage, clipped * advantage))
            entropy = mean(_entropy(dist))
            value, target, before = (
                td[key].squeeze(-1)
                for td, key in (
                    (values[name], "state_value"),
                    (rows, "value_target"),
                    (rows, "state_value"),
                )
            )
            error = mean(self._errors(name, value, target, before))
            terms = {
                "loss_objective": -gain,
                "loss_critic": ppo.critic_coeff * error,
                "loss_entropy": -ppo.entropy_coeff * entropy,
            }
            losses += terms.values()
            with torch.no_grad():
                variance = mean((target - mean(target)).square())
                residual = target - value
                terms |= {
                    "entropy": entropy,
                    "kl_approx": -mean(log_ratio),
                    "clip_fraction": mean((ratio != clipped).float()),
                    "explained_variance": 1
                    - mean((residual - mean(residual)).square())
                    / variance.clamp_min(1e-12),
                }
                for key, term in terms.items():
                    share = term.detach() / len(active)
                    logged[key] = logged[key] + share if key in logged else share
        return torch.stack(losses).sum(), logged

    def _policy_of(self, group: str) -> Any:
        policy: Any = self.policy
        return policy[group] if len(self.description.groups) > 1 else policy

    def _errors(
        self, group: str, value: Tensor, target: Tensor, before: Tensor
    ) -> Tensor:
        """Return the critic's loss of each row.

        Args:
            group: name of the group.
            value: of the critic.
            target: return that it shall be.
            before: value of the critic before the update.
        """
        ppo, unit = self.ppo, self._unit(group)[1]

        def measure(error: Tensor) -> Tensor:
            if ppo.huber_delta is None:
                return error.square()
            zero = torch.zeros_like(error)
            return F.huber_loss(error, zero, reduction="none", delta=ppo.huber_delta)

        errors = measure((value - target) / unit)
        if ppo.clip_value is not None:
            limit = ppo.clip_value * unit
            near = before + (value - before).clamp(-limit, limit)
            errors = torch.maximum(errors, measure((near - target) / unit))
        return errors

    def _unit(self, group: str) -> tuple[float, float]:
        """Return the mean and the standard deviation of what the critic learns.

        They are 0 and 1 unless values are normalised, also if a state has moments.
        """
        if not self.ppo.normalise_values:
            return 0.0, 1.0
        moments = self._moments["return", group]
        return moments.mean, moments.deviation

    def _preserve_values(self, group: str, mean: float, deviation: float) -> None:
        """Rescale last layers, so that values are those with the former moments.

        They are those of the target critic and, with ``popart``, of the critic.

        With the new mean m and deviation d, weights W and biases b become
        ``W * deviation / d`` and ``(b * deviation + mean - m) / d`` (PopArt).

        Args:
            group: whose moments have changed.
            mean: the former one.
            deviation: the former one.
        """
        new_mean, new_deviation = self._unit(group)
        index = list(self.description.groups).index(group)
        critics: list[Any] = [self.target, self.critic if self.ppo.popart else None]
        for critic in critics:
            if critic is None:
                continue
            network = critic
            if isinstance(critic, CrossGroupCritic):
                network = critic.module.group_heads[group]
            elif len(self.description.groups) > 1:
                network = critic[index]
            layer = layers_of(network)[-1]
            layer.weight.data.mul_(deviation / new_deviation)
            bias = layer.bias.data
            bias.mul_(deviation).add_(mean - new_mean).div_(new_deviation)

    def _inputs(self, batch: TensorDictBase) -> list[Any]:
        """Return the keys that training reads."""
        keys: set[Any] = {("next", "done"), ("next", "terminated")}
        flags = ("done", "terminated", "truncated")
        read = ("mask", "action_mask", ACTS, MEMBER)
        for name in self.description.groups:
            keys |= {(name, "action"), (name, "action_log_prob")}
            keys |= {("next", name, k) for k in ("reward", *flags)} | {(name, "done")}
            if self.options.network is not None:
                keys.add((name, "terminated"))
            for key in batch[name].keys(include_nested=True, leaves_only=True):
                parts = key_path(key)
                if parts[0] in ("observation", LAST_ACTION):
                    keys |= {(name, *parts), ("next", name, *parts)}
                elif parts[0] in read or parts[0].startswith("recurrent_"):
                    keys.add((name, *parts))
            if "mask" in batch["next", name].keys():
                keys.add(("next", name, "mask"))
        if self.options.recurrent is not None:
            keys.add("is_init")
            if self.ppo.recurrent_critic:
                trajectory_ids(batch)
                keys.add(TRAJ_IDS)
        return list(keys)


def _mean(x: Tensor, *, used: Tensor, count: Tensor) -> Tensor:
    """Return the mean over the rows that are used."""
    return torch.where(used, x, 0.0).sum() / count


def _orthogonalise(network: nn.Module, gain: float, last: float = 1.0) -> None:
    """Give a network orthogonal weights and no biases.

    Args:
        network: of a group's policy, or a critic.
        gain: of all layers but recurrent ones, which have 1, and the last.
        last: gain of the last layer, and of those with one output.
    """
    layers = layers_of(network)
    within = {
        layer
        for module in network.modules()
        if isinstance(module, RecurrentModule)
        for layer in module.network.modules()
    }
    for layer in layers:
        for name, stacked in stacked_tensors(layer).items():
            for tensor in stacked:
                if name == "bias":
                    tensor.zero_()
                elif layer in within:
                    nn.init.orthogonal_(tensor)
                else:
                    ends = layer is layers[-1] or len(tensor) == 1
                    nn.init.orthogonal_(tensor, last if ends else gain)


def layers_of(network: nn.Module) -> list[Any]:
    """Return the modules with weights of their own, in their order."""
    return [m for m in network.modules() if any(True for _ in m.parameters(False))]


def stacked_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return views ``[n, *shape]`` of a layer's weights: n is 1 if agents share it."""
    if isinstance(layer, AgentLayer):
        return layer.torch_layout()
    named = layer.named_parameters(recurse=False)
    return {name: weight.detach().unsqueeze(0) for name, weight in named}


def _entropy(dist: Any) -> Tensor:
    """Return the entropy; that of a sample where there is no formula."""
    try:
        entropy: Tensor = dist.entropy()
    except NotImplementedError:
        entropy = -dist.log_prob(dist.rsample())
    return entropy


def _filled(
    data: TensorDictBase, valid: Tensor | None, length: int
) -> tuple[TensorDictBase, Tensor]:
    """Return rows of whole sequences, and which of their frames are not padding.

    Padding repeats the last valid frame of a row, so that no network reads anything
    that no environment returned. Rows without a valid frame are left out.

    Args:
        data: ``[B, T]``.
        valid: which frames are, bool ``[B, T]``; None for all.
        length: of the sequences.
    """
    n_rows, frames = data.shape
    steps = torch.arange(-(-frames // length) * length, device=data.device)
    counts = torch.full((n_rows,), frames, device=data.device)
    if valid is not None:
        counts = valid.to(data.device).sum(1)
    elif len(steps) == frames:
        return data, torch.ones(data.shape, dtype=torch.bool, device=data.device)
    (rows,) = counts.nonzero(as_tuple=True)
    counts = counts[rows].unsqueeze(-1)
    index = rows.unsqueeze(-1) * frames + torch.minimum(steps, counts - 1)
    filled = take_rows(data.reshape(-1), index.flatten()).reshape(index.shape)
    return filled, steps < counts
