"""IPPO and MAPPO, with TorchRL's clipped loss.

Sources:
    Schulman et al., "Proximal Policy Optimization Algorithms", arXiv 1707.06347.
    IPPO: de Witt et al., "Is Independent Learning All You Need in the StarCraft
    Multi-Agent Challenge?", arXiv 2011.09533.
    MAPPO: Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent
    Games", arXiv 2103.01955.
"""

from collections.abc import Mapping
from typing import Any, final

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from marl_collect.core.description import EnvDescription
from marl_collect.core.signature import ACTS
from marl_collect.core.tensordicts import key_path, take_rows
from marl_collect.core.torch_defaults import float32_on
from marl_collect.errors import imports_of
from marl_collect.models import (
    RecurrentModule,
    make_critic,
    make_policy,
    set_recurrent_mode,
)
from marl_collect.training.advantages import TRAINED, write_advantages
from marl_collect.training.learner import (
    Learner,
    Metrics,
    each_once,
    training_rewards,
)
from marl_collect.training.options import Setup, TrainingOptions, network_options

_OBSERVED_AT_ONCE = 8_000_000
"""Bytes of observations in one pass of the critic. Activations take about 25 times as
much for pictures of bytes and the default convolutions."""
LOGGED = ("entropy", "kl_approx", "clip_fraction", "explained_variance")


@final
class PPOLearner(Learner):
    """Trains a policy and a critic for all groups, with one clipped loss per group.

    Rows of agents that do not act, and decisions whose outcome is not known, are left
    out of the losses, and of the mean and the standard deviation that normalise the
    advantages.
    """

    @float32_on("cpu")
    def __init__(
        self,
        description: EnvDescription,
        setup: Setup,
        options: TrainingOptions,
        seed: int,
    ) -> None:
        """Build the networks, with weights initialised from ``seed``."""
        super().__init__(description, setup, options, seed)
        torch.manual_seed(seed)
        self.ppo = options.ppo
        if options.recurrent is not None:
            _check_sequences(options)
        self.prefetch = options.ppo.prefetch
        self.policy = make_policy(description, **self.policy_options).to(self.device)
        self.critic = make_critic(
            description,
            centralised=setup.algorithm == "mappo",
            **network_options(setup, options, description),
        ).to(self.device)
        self._values = list(self.critic.out_keys)
        # The critic's state after the last batch, with which the next one begins.
        self._state: dict[Any, Tensor] = {}
        self.networks = {"policy": self.policy, "critic": self.critic}
        self.optimizer = self._adam(self.ppo.lr, eps=1e-5)
        self._losses = {name: self._make_loss(name) for name in description.groups}

    @classmethod
    @override
    def ignores(cls, setting: str, setup: Setup, options: TrainingOptions) -> bool:
        if options.recurrent is None and setting == "ppo.sequence_frames":
            return True
        return setting.startswith("value.")

    @float32_on("cpu")
    def update(self, batch: TensorDictBase, progress: float) -> Metrics:
        """Train on the batch for several epochs of minibatches."""
        self.note_first_ends(batch)
        lr = self.ppo.lr * (1 - progress if self.ppo.anneal else 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        data, self._state = self._prepared(batch)
        size = max(1, self.ppo.minibatch_frames // data[:1].numel())
        sums: dict[str, float] = {}
        steps = 0
        for _ in range(self.ppo.epochs):
            order = torch.randperm(len(data), generator=self.generator, device="cpu")
            order = order.to(self.device)
            for rows in order.split(size):
                minibatch = take_rows(data, rows)
                if not any(minibatch[g, TRAINED].any() for g in self._losses):
                    continue
                _loss, logged, norm = self._step(minibatch, self.ppo.max_grad_norm)
                steps += 1
                for name, value in (
                    logged | {"grad_norm": torch.tensor(norm, device="cpu")}
                ).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        return {name: value / steps for name, value in sums.items()} | {"lr": lr}

    def prepare(self, batch: TensorDictBase) -> TensorDictBase:
        """Estimate advantages and return the data for the loss.

        ``advantages.py`` has the rule for agents that wait or died.

        Returns:
            Frames ``[B * T]``, or sequences ``[S, sequence_frames]`` with their first
            states if the networks are recurrent.

        Raises:
            ValueError: if no decision in the batch has a known outcome.
        """
        return self._prepared(batch)[0]

    def _prepared(
        self, batch: TensorDictBase
    ) -> tuple[TensorDictBase, dict[Any, Tensor]]:
        """Return the data for the loss, and the critic's state after the batch."""
        data = batch.select(*self._inputs(batch)).to(self.device)
        team = self.options.reward == "team"
        rewards = training_rewards(data, self.description, team=team)
        for name, reward in rewards.items():
            once = each_once(reward, data[name, "done"], team=team)
            self._note_rewards(name, once)
            data["next", name, "reward"] = self._scaled(name, reward)
        with torch.no_grad():
            state = self._write_values(data)
            write_advantages(
                data,
                self.description,
                gamma=self.options.gamma,
                lmbda=self.ppo.lmbda,
                team=team,
            )
        if not any(data[name, TRAINED].any() for name in self.description.groups):
            raise ValueError(
                f"No action in the batch has a known outcome: with {data.shape[1]} "
                "frames per environment, no agent gets its next turn in the same "
                "batch. Raise frames_per_batch, or use fewer environments."
            )
        data = data.exclude("next")
        if self.options.recurrent is None:
            return data.reshape(-1), state
        length = _sequence_length(data.shape[1], self.ppo.sequence_frames)
        return data.reshape(-1, length), state

    def _write_values(self, data: TensorDictBase) -> dict[Any, Tensor]:
        """Write values at the root and under ``next``.

        For a recurrent critic, also write its state before each frame.
        """
        at_once = self._frames_at_once(data)
        if self.options.recurrent is None:
            self._criticise(data, at_once)
            self._criticise(data["next"], at_once)
            return {}
        modules = [m for m in self.critic.modules() if isinstance(m, RecurrentModule)]
        shapes = {k: s for m in modules for k, s in m.state_shapes.items()}
        before = {}
        for key, shape in shapes.items():
            data[key] = torch.zeros(*data.shape, *shape, device=self.device)
            if key in self._state and len(self._state[key]) == len(data):
                before[key] = self._state[key]
        length = min(data.shape[1], at_once)
        outputs: list[TensorDictBase] = []
        for part in data.split(length, 1):
            for key, state in before.items():
                part[key][:, 0] = state
            with set_recurrent_mode():
                rows = part.split(max(1, at_once // length))
                outputs.append(torch.cat([self._values_of(row) for row in rows]))
            before = {key: outputs[-1]["next"][key][:, -1] for key in shapes}
        whole: TensorDictBase = torch.cat(outputs, 1)
        data.update(whole)
        for key in shapes:
            data[key][:, 1:] = data["next"][key][:, :-1]
        # Single steps, each from the state before it.
        self._criticise(data["next"], at_once)
        return {key: state.clone() for key, state in before.items()}

    def _criticise(self, data: TensorDictBase, at_once: int) -> None:
        """Write the critic's outputs for all frames, computed a few at a time."""
        parts = data.reshape(-1).split(at_once)
        outputs = torch.cat([self._values_of(part) for part in parts])
        data.update(outputs.reshape(data.shape))

    def _values_of(self, data: TensorDictBase) -> TensorDictBase:
        return self.critic(data).select(*self._values, strict=False)

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
        """Return everything that an exact resume needs, with the critic's state."""
        return super().state_dict() | {"critic_state": dict(self._state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``, with the critic's state."""
        super().load_state_dict(state)
        self._state = dict(state["critic_state"])

    def loss(self, minibatch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the groups' losses, and the groups' mean metrics.

        Losses count trained rows only. TorchRL computes ``LOGGED`` over all rows,
        including agents that wait, died, or acted with another policy.

        Groups without trained rows in the minibatch are left out.
        """
        losses: list[Tensor] = []
        logged: dict[str, Tensor] = {}
        active = [g for g in self._losses if minibatch[g, TRAINED].any()]
        for group in active:
            with set_recurrent_mode(self.options.recurrent is not None):
                results = self._losses[group](minibatch)
            for name, value in results.items():
                if name.startswith("loss_"):
                    losses.append(value)
                elif name not in LOGGED:
                    continue
                mean = value.detach().mean() / len(active)
                logged[name] = logged.get(name, 0.0) + mean
        return torch.stack(losses).sum(), logged

    def _inputs(self, batch: TensorDictBase) -> list[Any]:
        """Return the keys that training reads."""
        keys: set[Any] = {("next", "done"), ("next", "terminated")}
        flags = ("done", "terminated", "truncated")
        read = ("mask", "action_mask", ACTS)
        for name in self.description.groups:
            keys |= {(name, "action"), (name, "action_log_prob")}
            keys |= {("next", name, k) for k in ("reward", *flags)} | {(name, "done")}
            for key in batch[name].keys(include_nested=True, leaves_only=True):
                parts = key_path(key)
                if parts[0] == "observation":
                    keys |= {(name, *parts), ("next", name, *parts)}
                elif parts[0] in read or parts[0].startswith("recurrent_"):
                    keys.add((name, *parts))
            if "mask" in batch["next", name].keys():
                keys.add(("next", name, "mask"))
        if self.options.recurrent is not None:
            keys.add("is_init")
        return list(keys)

    def _make_loss(self, name: str) -> Any:
        with imports_of("torchrl", "PPOLearner"):
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
        loss.loss_mask_key = (name, TRAINED)
        return loss


def _sequence_length(frames: int, most: int) -> int:
    """Return the largest divisor of ``frames`` that is at most ``most``."""
    return next(n for n in range(min(most, frames), 0, -1) if frames % n == 0)


def _check_sequences(options: TrainingOptions) -> None:
    """Check that the frames of an environment can be divided into long sequences.

    Raises:
        ValueError: if these are shorter than half of what was asked for.
    """
    environments = options.workers * options.envs_per_worker
    frames = -(-options.frames_per_batch // environments)
    most = options.ppo.sequence_frames
    length = _sequence_length(frames, most)
    if 2 * length < min(most, frames):
        whole = environments * most * -(-frames // most)
        raise ValueError(
            f"ppo.sequence_frames is {most}, but each of the {environments} "
            f"environments has {frames} frames in a batch, which can be divided into "
            f"sequences of {length} at most. Use frames_per_batch={whole}, or other "
            "numbers of workers or environments."
        )
