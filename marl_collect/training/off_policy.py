"""What learners with a replay buffer and target networks have in common."""

import abc
import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.buffers.layout import TRAJ_IDS, VALID
from marl_collect.core.description import EnvDescription
from marl_collect.core.tensordicts import take_rows
from marl_collect.core.torch_defaults import float32_on
from marl_collect.training.advantages import waiting
from marl_collect.training.learner import Learner, Metrics, each_once, follow
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.replay_buffer import ReplayBuffer


class OffPolicyLearner(Learner):
    """Takes gradient steps on frames or episodes drawn from a replay buffer.

    Attributes:
        losses: names of the metrics of ``loss``.
        clips_apart: whether the gradient of each network is clipped alone.
        value: the options.
        online: the networks that are trained.
        target: their copy, which follows them.
        replay: the replay buffer.
    """

    every_task = False
    skips_padding = True
    losses: ClassVar[tuple[str, ...]] = ("loss",)
    clips_apart: ClassVar[bool] = False
    online: nn.Module
    target: nn.Module

    def __init__(
        self,
        description: EnvDescription,
        setup: Setup,
        options: TrainingOptions,
        seed: int,
    ) -> None:
        """Prepare everything but the networks, and seed their weights.

        Args:
            description: of the environment.
            setup: algorithm, sharing and centralisation.
            options: of the run.
            seed: of the learner's random numbers.

        Raises:
            ValueError: if training would never begin.
        """
        super().__init__(description, setup, options, seed)
        torch.manual_seed(seed)
        self.value = options.value
        self.prefetch = self.value.prefetch
        self.warm_up_frames = self.value.warm_up_frames
        if options.frames < self.value.warm_up_frames:
            raise ValueError(
                f"frames is {options.frames}, but training begins after "
                f"value.warm_up_frames={self.value.warm_up_frames}. Raise one or lower "
                "the other."
            )
        whole = self._replays_episodes()
        self.replay = ReplayBuffer(self.value.buffer_frames, self.device, whole=whole)
        self._due = 0

    def _replays_episodes(self) -> bool:
        """Return whether minibatches consist of whole episodes."""
        return False

    def _copy_to_target(self, online: nn.Module) -> None:
        """Set the trained networks, and target networks with the same weights."""
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(requires_grad=False)

    @property
    def untrained(self) -> dict[str, nn.Module]:
        """The target networks."""
        return {"targets": self.target}

    @override
    def synchronise(self) -> None:
        self.explore()  # The weights say how another learner explored.
        follow(self.target, self.online, 1.0)

    @override
    def learn(self, batch: TensorDictBase, progress: float) -> Metrics:
        batch = self._joined(batch)
        new_episodes = self.remember(batch)
        nothing = dict.fromkeys(self.losses, float("nan")) | {"grad_norm": 0.0}
        nothing |= self.explore()
        if self.frames < self.value.warm_up_frames:
            return nothing
        value = self.value
        if self.replay.whole:
            size, per_update = value.minibatch_episodes, value.episodes_per_update
            new = new_episodes
        else:
            size, per_update = value.minibatch_frames, value.frames_per_update
            new = batch.numel()
        count, self._due = divmod(self._due + new, per_update)
        steps = []
        for _ in range(count):
            minibatch = self.replay.take(self.replay.draw(size, self.generator))
            steps.append(
                self._step(minibatch, value.max_grad_norm, apart=self.clips_apart)
            )
            if self.updates % value.target_interval == 0:
                follow(self.target, self.online, value.tau)
        return nothing | self._means(steps)

    @abc.abstractmethod
    def remember(self, batch: TensorDictBase) -> int:
        """Add what training reads of a batch ``[B, T]`` to the replay buffer.

        Returns:
            The number of episodes that end in the batch.
        """

    def explore(self) -> Metrics:
        """Set how the policy explores after ``frames``, and return metrics of it."""
        return {}

    def _experience(
        self,
        batch: TensorDictBase,
        name: str,
        reward: Tensor,
        acts: Tensor,
        follows: Tensor,
    ) -> dict[str, Tensor]:
        """Return what the agents of a group learn from, one by one, ``[B, T, n]``.

        Args:
            batch: ``[B, T]``.
            name: of the group.
            reward: from ``training_rewards``.
            acts: which agents act.
            follows: which of them have a next value.

        Raises:
            ValueError: if agents wait for their turn.
        """
        if waiting(batch, name).any():
            raise ValueError(
                f"{self.setup.name} learns from the next decision of each agent, "
                "but agents wait for their turn here. Use vdn, qmix, ippo or mappo."
            )
        team = self.options.reward == "team"
        self._note_rewards(name, each_once(reward, batch[name]["done"], team=team))
        end = "terminated" if self.options.bootstrap_limits else "done"
        ended = batch["next", name, end].squeeze(-1)
        return {
            "acts": acts,
            "follows": follows,
            "reward": reward.squeeze(-1),
            "discount": self.options.gamma * ~ended,
            "counts": (acts & (ended | follows)).to(reward.dtype),
        }

    def _joined(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a batch with padding as one row ``[1, N]`` of its valid frames.

        Raises:
            ValueError: if whole episodes are replayed, but a row ends within one.
        """
        valid = batch.get(VALID, None)
        if valid is None:
            return batch
        joined = take_rows(batch.reshape(-1), valid.flatten().nonzero().squeeze(-1))
        last = valid.sum(1).cumsum(0) - 1
        if self.replay.whole and not joined["next", "done"][last].all():
            raise ValueError(
                f"{self.setup.name} replays whole episodes, but a row of the batch "
                "ends within one: pass trajs_per_batch, and omit split_trajs, "
                "preemptive_threshold and lists of frames_per_batch."
            )
        # The trajectories of a row may be of several environments.
        joined[TRAJ_IDS] = torch.zeros_like(joined["next", "done"].squeeze(-1)).long()
        return joined.unsqueeze(0)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs, including the buffer."""
        state = {"replay": self.replay.state_dict(), "due": self._due}
        return super().state_dict() | state

    @float32_on("cpu")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``, including the buffer.

        Raises:
            ValueError: if the buffer has another capacity, or replays frames instead of
                episodes or the reverse; nothing is changed.
        """
        self.replay.check(state["replay"])
        super().load_state_dict(state)
        self.replay.load_state_dict(state["replay"])
        self._due = state["due"]
        self.explore()
