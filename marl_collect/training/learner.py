"""Base class of learners, and the rewards that they train with."""

import abc
import copy
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from marl_collect.core.description import EnvDescription
from marl_collect.core.first_ends import FirstEnds
from marl_collect.core.seeding import (
    Purpose,
    derive,
    set_torch_generators,
    torch_generators,
)
from marl_collect.models.saved_policy import (
    load_networks,
    policy_state,
    read_tensors,
    write_tensors,
)
from marl_collect.options import nearest
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.moments import RunningMoments
from marl_collect.training.options import Setup, TrainingOptions, policy_options

Metrics = dict[str, float]


class NotFiniteError(ValueError):
    """A run cannot go on, because a reward or a gradient is NaN or infinite."""


class Learner(abc.ABC):
    """Owns networks and an optimiser, and learns from batches ``[B, T]``.

    Attributes:
        every_task: whether the learner supports every task. Setups of the others are
            left out of a comparison if they do not fit its task.
        policy: the policy that collectors use.
        policy_options: with which ``make_policy`` built it; saved with its weights.
        networks: all trained modules by name, including the policy.
        optimizer: of all their parameters.
        updates: number of gradient steps so far.
        prefetch: whether the next batch is collected during training.
        warm_up_frames: how many frames are collected with random actions first.
    """

    every_task: ClassVar[bool] = True
    warm_up_frames: int | None = None
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
        self.device = _available(options.device)
        self.generator = torch.Generator("cpu")
        self.generator.manual_seed(derive(seed, Purpose.MINIBATCHES))
        self.updates = 0
        self._moments: dict[str, RunningMoments] = {}
        """Of rewards, by group."""
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
        del setting, setup, options
        return False

    @final
    def note_first_ends(self, batch: TensorDictBase) -> None:
        """Warn once if episodes of the batch end with their first agent."""
        self._ends.look(batch["next"].get)

    @abc.abstractmethod
    def update(self, batch: TensorDictBase, progress: float) -> Metrics:
        """Learn from a batch and return metrics, such as mean losses.

        Args:
            batch: ``[B, T]`` from a collector; not modified.
            progress: share of the run's frames collected so far, in [0, 1].
        """

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
    def parameters(self) -> Iterator[nn.Parameter]:
        """Return every trained parameter once, even if networks share it."""
        return nn.ModuleList(self.networks.values()).parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs."""
        modules = self.networks | self.untrained
        return {
            "networks": {name: net.state_dict() for name, net in modules.items()},
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "moments": {name: m.state_dict() for name, m in self._moments.items()},
            "generator": self.generator.get_state(),
            **torch_generators(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` of the same setup and networks.

        The options stay those of this learner, such as the learning rate.

        Raises:
            RuntimeError: if a network has other weights; nothing is changed.
        """
        modules = self.networks | self.untrained
        for parts in (copy.deepcopy(modules), modules):  # The copies may be refused.
            for name, net in parts.items():
                net.load_state_dict(state["networks"][name])
        own = {"param_groups": self.optimizer.state_dict()["param_groups"]}
        self.optimizer.load_state_dict({**state["optimizer"], **own})
        self.updates = state["updates"]
        self._moments = {}
        for name, moments in state["moments"].items():
            self._moments[name] = RunningMoments()
            self._moments[name].load_state_dict(moments)
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
            self._moments.setdefault(group, RunningMoments()).add(rewards)

    @final
    def _scaled(self, group: str, rewards: Tensor) -> Tensor:
        """Return rewards of a group, standardised if the options say so, and scaled."""
        if self.options.standardise_rewards:
            rewards = self._moments[group].standardise(rewards)
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
        found = (~norm.isfinite()).float()
        self.optimizer.found_inf = found  # type: ignore[attr-defined]
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


def _available(name: str) -> torch.device:
    """Return a device, after computing on it.

    Raises:
        ValueError: if that fails; says why.
    """
    device = torch.device(name)
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {error}") from error
    return device


def team_reward(batch: TensorDictBase, description: EnvDescription) -> Tensor:
    """Return the rewards summed over all agents of all groups, ``[*B, 1]``."""
    sums = [batch["next", name, "reward"].sum(-2) for name in description.groups]
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


def n_agents(description: EnvDescription) -> int:
    """Return the number of agents in all groups."""
    return sum(group.n_agents for group in description.groups.values())


def training_rewards(
    data: TensorDictBase, description: EnvDescription, *, team: bool
) -> dict[str, Tensor]:
    """Return the rewards that each group's agents learn from, ``[*B, n, 1]``.

    Args:
        data: ``[*B]``, with ``("next", group, "reward")`` ``[*B, n, 1]``.
        description: of the environment.
        team: whether every agent gets the mean over all agents.

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
    mean = team_reward(data, description) / n_agents(description)
    return {
        name: mean.unsqueeze(-2).expand_as(reward).contiguous()
        for name, reward in rewards.items()
    }
