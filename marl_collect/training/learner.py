"""Base class of learners, and the rewards that they train with."""

import abc
import copy
import importlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from marl_collect.buffers.layout import TRAJ_IDS, VALID
from marl_collect.core.description import EnvDescription
from marl_collect.core.first_ends import FirstEnds
from marl_collect.core.seeding import (
    Purpose,
    derive,
    set_torch_generators,
    torch_generators,
)
from marl_collect.core.torch_defaults import float32_on, torch_threads
from marl_collect.models.saved_policy import (
    load_networks,
    policy_state,
    read_tensors,
    write_tensors,
)
from marl_collect.options import nearest
from marl_collect.training.advantages import members
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.options import Setup, TrainingOptions, policy_options

Metrics = dict[str, float]


class NotFiniteError(ValueError):
    """A run cannot go on, because a reward or a gradient is NaN or infinite."""


class Learner(abc.ABC):
    """Owns networks and an optimiser, and learns from batches ``[B, T]``.

    Attributes:
        every_task: whether the learner supports every task. Setups of the others are
            left out of a comparison if they do not fit its task.
        skips_padding: whether batches may have padding, which the learner then ignores.
        policy: the policy that collectors use.
        policy_options: with which ``make_policy`` built it; saved with its weights.
        networks: all trained modules by name, including the policy.
        optimizer: of all their parameters.
        frames: number of frames so far, without padding.
        updates: number of gradient steps so far.
        prefetch: whether the next batch is collected during training.
        warm_up_frames: how many frames are collected with random actions first.
        episodes_per_batch: number of whole episodes of a batch, which all begin with
            the newest weights; None for ``frames_per_batch`` frames.
    """

    every_task: ClassVar[bool] = True
    skips_padding: ClassVar[bool] = False
    warm_up_frames: int | None = None
    episodes_per_batch: int | None = None
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

        Raises:
            TypeError: if an argument is of another kind; says what to pass.
            ValueError: if the device cannot be used here.
        """
        self._check_kinds(description, setup, options)
        self.description = description
        self.setup = setup
        self.options = options
        self.policy_options = policy_options(setup, options, description)
        self.device = torch.device(options.device)
        try:
            torch.zeros(1, device=self.device).item()
        except (AssertionError, RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"device {options.device!r} cannot be used: {error}"
            ) from error
        self.generator = torch.Generator("cpu")
        self.generator.manual_seed(derive(seed, Purpose.MINIBATCHES))
        self.updates = 0
        self.frames = 0
        self._moments = defaultdict[tuple[str, str], RunningMoments](RunningMoments)
        """By what they are of, ``"reward"`` or ``"return"``, and group."""
        self._ends = FirstEnds(description)

    @classmethod
    def _check_kinds(cls, description: Any, setup: Any, options: Any) -> None:
        """Raise TypeError if an argument of a user's script is of another kind."""
        algorithm = nearest(str(setup), list(ALGORITHMS), most=1) or ["mappo"]
        for value, kind, cure in (
            (description, EnvDescription, "describe(make_env)"),
            (setup, Setup, f"Setup({algorithm[0]!r})"),
            (
                options,
                TrainingOptions,
                'TrainingOptions().with_settings({"gamma": 0.9})',
            ),
        ):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{cls.__name__} expected {kind.__name__} as its argument, but "
                    f"found {value!r} of type {type(value).__name__}: pass {cure}."
                )

    @classmethod
    def default_setups(cls, algorithm: str, *, agent_ids: bool) -> list[Setup]:
        """Return the setups of an algorithm that are compared by default.

        Args:
            algorithm: of this learner.
            agent_ids: whether a group has several agents, which identities tell apart.
        """
        setups = [
            Setup(algorithm, centralised, share_params)
            for centralised in (False, True)
            for share_params in (True, False)
        ]
        return [*setups, Setup(algorithm, agent_ids=True)] if agent_ids else setups

    @classmethod
    def ignores(cls, setting: str, setup: Setup, options: TrainingOptions) -> bool:
        """Return whether a setting has no effect on the runs of a setup.

        Args:
            setting: name, as for ``TrainingOptions.with_settings``.
            setup: whose algorithm has this learner.
            options: of the runs.
        """
        del setup
        return setting == "hidden_size" and options.recurrent is None

    @final
    @float32_on("cpu")
    def update(self, batch: TensorDictBase, progress: float) -> Metrics:
        """Learn from a batch and return metrics, such as mean losses.

        Args:
            batch: ``[B, T]`` from a collector, with a row for each environment or, with
                ``trajs_per_batch`` or ``split_trajs``, for each trajectory; not
                modified. Padding, where ``("collector", "mask")`` is False, has no
                influence on anything that is learnt.
            progress: share of the run's frames collected so far. The last batch may
                exceed them: more than 1 counts as 1.

        Raises:
            ValueError: if the batch has another form, or lacks next observations; says
                what to pass.
            NotFiniteError: if a reward or a gradient is NaN or infinite.
        """
        with torch_threads(self.options.threads):
            valid = self._checked(batch)
            self.frames += int(valid.sum())
            self._ends.look(lambda key: batch["next"].get(key)[valid])
            return self.learn(batch, min(1.0, progress))

    @abc.abstractmethod
    def learn(self, batch: TensorDictBase, progress: float) -> Metrics:
        """Do what ``update`` says, with a batch that was checked."""

    def _checked(self, batch: TensorDictBase) -> Tensor:
        """Return which frames are valid, bool ``[B, T]``.

        Raises:
            ValueError: see ``update``.
        """
        problem = ""
        size, valid = list(batch.shape), batch.get(VALID, None)
        ids = batch.get(TRAJ_IDS, None)
        if batch.ndim != 2:
            problem = (
                f"has the batch size {size}: omit cat_results, and pass "
                'traj_format="padded" for whole trajectories'
            )
        elif batch.names[0] == "time":
            problem = f"is [T, B] = {size}: pass batch.transpose(0, 1)"
        elif any(
            "observation" not in batch["next", name].keys()
            for name in self.description.groups
        ):
            problem = "has no next observations: pass restore_next(batch)"
        elif valid is None:
            valid = torch.ones(
                size, dtype=torch.bool, device=batch["next", "done"].device
            )
        elif not self.skips_padding:
            problem = (
                'has padding, where ("collector", "mask") is False: omit '
                "trajs_per_batch, split_trajs, preemptive_threshold and lists of "
                "frames_per_batch"
            )
        elif (valid[:, 1:] & ~valid[:, :-1]).any():
            problem = 'has valid frames after padding in ("collector", "mask")'
        if not problem and ids is not None:
            environments = ids >> 32
            if ((environments != environments[:, :1]) & valid).any():
                problem = (
                    "has frames of several environments in a row: omit cat_results"
                )
        if problem:
            raise ValueError(
                f"{type(self).__name__} learns from batches [B, T], but this one "
                f"{problem}."
            )
        return valid

    @abc.abstractmethod
    def loss(self, minibatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to minimise and metrics to log."""

    @property
    def untrained(self) -> dict[str, nn.Module]:
        """Further modules whose weights the learner saves, such as target networks."""
        return {}

    def synchronise(self) -> None:  # noqa: B027 - most have none
        """Give ``untrained`` the weights of the networks that they follow."""

    @final
    def load_initial(self) -> None:
        """Give the networks the weights of ``options.initial``, if there are any.

        A learner calls it once it has built its networks.

        Raises:
            FileNotFoundError: if there is nothing at the path.
            ValueError: if the weights do not fit; names the file.
        """
        if self.options.initial is not None:
            load_networks(self.options.initial, self.networks, self.description)
            self.synchronise()

    @final
    def parameters(self) -> Iterator[nn.Parameter]:
        """Return every trained parameter once, even if networks share it."""
        return nn.ModuleList(self.networks.values()).parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs.

        Tensors are the learner's own and change with it, as in torch.
        """
        modules = self.networks | self.untrained
        return {
            "networks": {name: net.state_dict() for name, net in modules.items()},
            "optimizer": self.optimizer.state_dict(),
            "groups": self._groups,
            "frames": self.frames,
            "updates": self.updates,
            "moments": {key: m.state_dict() for key, m in self._moments.items()},
            "generator": self.generator.get_state(),
            **torch_generators(),
        }

    @property
    def _groups(self) -> dict[str, str]:
        """What the state depends on of each group of the environment."""
        return {
            name: f"{group.n_agents} agents, observation {group.observation}, "
            f"action {group.action}{', action masks' if group.action_mask else ''}"
            for name, group in self.description.groups.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` of the same environment, setup and networks.

        The options stay those of this learner, such as the learning rate.

        Raises:
            ValueError: if the environment has other groups; nothing is changed.
            RuntimeError: if a network has other weights; nothing is changed.
        """
        if state["groups"] != self._groups:
            raise ValueError(
                f"The state is of a learner for the groups {state['groups']}, but this "
                f"environment has {self._groups}."
            )
        modules = self.networks | self.untrained
        for parts in (copy.deepcopy(modules), modules):  # The copies may be refused.
            for name, net in parts.items():
                net.load_state_dict(state["networks"][name])
        groups = {"param_groups": self.optimizer.state_dict()["param_groups"]}
        # A copy, because the optimiser takes tensors over. Those of another learner
        # would be changed by the steps of both.
        moments = copy.deepcopy(state["optimizer"])
        self.optimizer.load_state_dict({**moments, **groups})
        self.updates = state["updates"]
        self.frames = state["frames"]
        self._moments.clear()
        for key, of_rewards in state["moments"].items():
            self._moments[key].load_state_dict(of_rewards)
        self.generator.set_state(state["generator"])
        set_torch_generators(state)

    @final
    def save(self, path: Path | str) -> None:
        """Save the learner to a file, completely or not at all.

        ``load`` restores it. ``load_policy``, and ``--policy`` on the command line,
        read the policy alone from the same file.
        """
        about = policy_state(self.description, self.policy_options)
        state = {"setup": self.setup.name, **about, **self.state_dict()}
        write_tensors(Path(path), state)

    @final
    def load(self, path: Path | str) -> None:
        """Restore what ``save`` wrote: training continues as if it had not stopped.

        Args:
            path: a file of a learner with the same environment, setup and networks.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged, or is of a learner with another setup,
                other networks or another replay buffer, or has a policy only; names
                the file. The learner is then unchanged.
        """
        state = read_tensors(Path(path))
        setup = state.get("setup") if isinstance(state, dict) else None
        if setup is None:
            raise ValueError(
                f"{path} has a policy only, or something else: learner.save(path) "
                "writes what load restores. load_policy(path) reads a policy."
            )
        if setup != self.setup.name:
            raise ValueError(
                f"{path} does not fit the learner: it has the setup {setup}, but the "
                f"learner has {self.setup.name}."
            )
        # Copies, because a network may fit, and the next one not.
        load_networks(str(path), copy.deepcopy(self.networks), self.description)
        try:
            self.load_state_dict(state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} does not fit the learner: {error}") from error

    @final
    def _note_rewards(self, group: str, rewards: Tensor) -> None:
        """Add a group's new rewards to those that standardise them."""
        if self.options.standardise_rewards:
            self._moments["reward", group].add(rewards)

    @final
    def _scaled(self, group: str, rewards: Tensor) -> Tensor:
        """Return rewards of a group, standardised if the options say so, and scaled."""
        if self.options.standardise_rewards:
            rewards = self._moments["reward", group].standardise(rewards)
        return rewards * self.options.reward_scale

    @final
    def _adam(self, lr: float, eps: float = 1e-8) -> torch.optim.Optimizer:
        """Return Adam of all trained parameters, with a group for each network.

        It does not change the weights if the gradient is not finite.
        """
        taken: set[nn.Parameter] = set()
        groups = []
        for network in self.networks.values():
            parameters = [p for p in network.parameters() if p not in taken]
            taken.update(parameters)
            if parameters:
                groups.append({"params": parameters})
        return torch.optim.Adam(groups, lr=lr, eps=eps, fused=True)

    @final
    def _step(
        self, minibatch: Any, max_grad_norm: float, *, apart: bool = False
    ) -> dict[str, Tensor]:
        """Take one optimiser step on a minibatch, without waiting for a device.

        Args:
            minibatch: argument of ``loss``.
            max_grad_norm: to which the gradient is clipped.
            apart: whether each group of the optimiser is clipped alone.

        Returns:
            The metrics of ``loss``, and ``"grad_norm"``, for ``_means``.
        """
        self.optimizer.zero_grad()
        loss, logged = self.loss(minibatch)
        loss.backward()
        parts = [group["params"] for group in self.optimizer.param_groups]
        if not apart:
            parts = [[parameter for part in parts for parameter in part]]
        clip = nn.utils.clip_grad_norm_
        norms = torch.stack([clip(part, max_grad_norm) for part in parts])
        norm = torch.linalg.vector_norm(norms)
        # As gradient scalers tell it: fused optimisers then leave the weights.
        nonfinite = (~norm.isfinite()).float()
        self.optimizer.found_inf = nonfinite  # type: ignore[attr-defined]
        self.optimizer.step()
        self.updates += 1
        return logged | {"grad_norm": norm}

    @final
    def _means(self, steps: Sequence[Mapping[str, Tensor]]) -> Metrics:
        """Return the means over an update's steps; waits for a device once.

        Args:
            steps: what ``_step`` returned. A metric that a step lacks counts as 0.

        Raises:
            NotFiniteError: if a gradient was not finite.
        """
        names = list(dict.fromkeys(name for logged in steps for name in logged))
        sums = [
            torch.stack([logged[name] for logged in steps if name in logged]).sum()
            for name in names
        ]
        means = torch.stack(sums).div(len(steps)).tolist() if steps else []
        metrics = dict(zip(names, means, strict=True))
        if not math.isfinite(metrics.get("grad_norm", 0.0)):
            raise NotFiniteError(
                f"The gradient of {self.setup.name} is NaN or infinite. Either an "
                "observation is, which check_env(factory) reports with its frame, or "
                "training diverged: lower the learning rate or reward_scale."
            )
        return metrics


def learner_of(algorithm: str) -> type[Learner]:
    """Import the learner of an algorithm."""
    module, _, name = ALGORITHMS[algorithm].partition(":")
    learner: type[Learner] = getattr(importlib.import_module(module), name)
    return learner


def team_reward(batch: TensorDictBase, description: EnvDescription) -> Tensor:
    """Return the rewards summed over all agents of all groups, ``[*B, 1]``.

    Of a batch of one of several policies, they are those of this policy's agents.
    """
    sums = [
        torch.where(members(batch, name), batch["next", name, "reward"], 0.0).sum(-2)
        for name in description.groups
    ]
    return torch.stack(sums).sum(0)


def each_once(rewards: Tensor, done: Tensor, *, team: bool) -> Tensor:
    """Return the rewards that are to be standardised, one-dimensional.

    Args:
        rewards: of a group, from ``training_rewards``.
        done: which agents had ended before the frame; their rewards are left out.
        team: whether all agents have the reward in common, which then counts once per
            frame, not once per agent.
    """
    return rewards[..., 0, :].flatten() if team else rewards[~done]


def training_rewards(
    data: TensorDictBase, description: EnvDescription, *, team: bool
) -> dict[str, Tensor]:
    """Return the rewards that each group's agents learn from, ``[*B, n, 1]``.

    Args:
        data: ``[*B]``, with ``("next", group, "reward")`` ``[*B, n, 1]``.
        description: of the environment.
        team: whether every agent gets the mean over all agents of its policy.

    Raises:
        NotFiniteError: if a reward is not finite; names the group.
    """
    rewards = {name: data["next", name, "reward"] for name in description.groups}
    for name, reward in rewards.items():
        if not reward.isfinite().all():
            raise NotFiniteError(
                f"A reward of group {name!r} is NaN or infinite, so nothing can be "
                "trained with it. Correct the environment; check_env(factory) reports "
                "the frame."
            )
    if not team:
        return rewards
    counts = [members(data, name).sum(-2) for name in description.groups]
    # Nobody is a member in a frame of random actions, which nothing is trained with.
    mean = team_reward(data, description) / torch.stack(counts).sum(0).clamp_min(1)
    return {
        name: mean.unsqueeze(-2).expand_as(reward).contiguous()
        for name, reward in rewards.items()
    }


def trajectory_ids(batch: TensorDictBase) -> Tensor:
    """Return the numbers of the trajectories of a batch, int64 ``[B, T]``.

    Raises:
        ValueError: if the batch has none; says what to pass.
    """
    ids: Tensor | None = batch.get(TRAJ_IDS, None)
    if ids is None:
        raise ValueError(
            "The batch does not say which trajectories its frames belong to: omit "
            "track_traj_ids=False."
        )
    return ids


def follow(target: nn.Module, trained: nn.Module, share: float) -> None:
    """Move the weights of a target network towards those that are trained.

    They are looked up in each call, because a copy of a learner has its own.

    Args:
        target: whose weights change.
        trained: network with the same weights by name.
        share: of the trained weights in the new ones; 1 copies them.
    """
    targets, weights = (
        [weight.data for weight in net.parameters()] for net in (target, trained)
    )
    torch._foreach_lerp_(targets, weights, share)  # One call for all of them.


@final
class RunningMoments:
    """Mean and standard deviation of all numbers that were added.

    Source:
        Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances", COMPSTAT 1982.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0  # Sum of the squared deviations from the mean.

    def add(self, numbers: Tensor) -> None:
        """Add numbers of any shape."""
        count = numbers.numel()
        if not count:
            return
        numbers = numbers.double()
        mean = float(numbers.mean())
        squares = float((numbers - mean).square().sum())
        total, apart = self._count + count, mean - self._mean
        self._squares += squares + apart**2 * self._count * count / total
        self._mean += apart * count / total
        self._count = total

    @property
    def mean(self) -> float:
        """The mean; 0 without numbers."""
        return self._mean

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 if all numbers are equal."""
        return math.sqrt(self._squares / max(1, self._count)) or 1.0

    def standardise(self, numbers: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation."""
        return (numbers - self.mean) / self.deviation

    def state_dict(self) -> dict[str, float]:
        """Return the count, the mean and the sum of squared deviations."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a ``state_dict``."""
        self._count = int(state["count"])
        self._mean, self._squares = state["mean"], state["squares"]
