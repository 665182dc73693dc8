"""Heads: convert a network's outputs to actions and their log-probabilities.

A head is the last module of a policy. It reads the distribution's parameters from the
group's keys and writes ``(group, "action")`` and ``(group, "action_log_prob")``.
tensordict's interaction type (``set_interaction_type``) selects how actions are chosen.
"""

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from torch import Tensor
from typing_extensions import override

from marl_collect.core.tensordicts import key_path
from marl_collect.models.distributions.base import ActionDistribution, NoiseKind
from marl_collect.models.distributions.categorical import (
    MaskedCategorical,
    MaskedOneHotCategorical,
    MultiCategorical,
)
from marl_collect.models.distributions.normal import IndependentNormal, TanhNormal


@dataclass(frozen=True)
class HeadOptions:
    """Options of all heads.

    Attributes:
        group: name of the group, the first part of keys such as ``(group, "action")``.
        agents: agent names in row order, for messages.
        return_log_prob: whether to write ``(group, "action_log_prob")``, ``[*B, n]``.
        default_interaction_type: interaction type outside ``set_interaction_type``.
            Collectors always set the type.
    """

    group: str = "agents"
    agents: tuple[str, ...] = ()
    return_log_prob: bool = True
    default_interaction_type: InteractionType = InteractionType.DETERMINISTIC


class ActionHead(ProbabilisticTensorDictModule, abc.ABC):
    """Base class of heads.

    A caller with its own random generators (a worker, with one per environment) sets
    ``noise``. The head then uses this noise instead of torch's global generator, and
    the same noise gives the same actions in every call.

    Attributes:
        group: name of the group.
        n_outputs: number of network outputs per agent that the head needs.
        needs_scale: whether ``LocScale`` must split them into means and deviations.
        noise_kind: noise that the head takes, standard Gumbel or standard normal.
        noise_size: amount of noise per agent.
        noise: ``[*B, n_agents, noise_size]`` to sample from, or ``None``.
    """

    pure_forward = True

    n_outputs: int
    needs_scale: bool = False
    noise_kind: NoiseKind
    noise_size: int

    def __init__(
        self,
        parameters: Mapping[str, str],
        options: HeadOptions,
    ) -> None:
        """Set the keys; ``parameters`` maps the distribution's parameters to keys."""
        group = options.group
        super().__init__(
            in_keys={name: (group, key) for name, key in parameters.items()},
            out_keys=[(group, "action")],
            default_interaction_type=options.default_interaction_type,
            return_log_prob=options.return_log_prob,
            log_prob_key=(group, "action_log_prob"),
        )
        self.group = group
        self.options = options
        self.noise: Tensor | None = None

    @abc.abstractmethod
    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        """Build the distribution from its parameters, ``[*B, n_agents, ...]`` each."""

    def get_dist(self, tensordict: TensorDictBase) -> ActionDistribution:
        """Build the distribution from the parameters in ``tensordict``.

        Raises:
            KeyError: if a key is missing; names it.
        """
        parameters: dict[str, Tensor] = {}
        for name, key in zip(self.dist_keys, self.in_keys, strict=True):
            value = tensordict.get(key, None)
            if value is None:
                raise KeyError(
                    f"The head of group {self.group!r} needs {show_keys([key])}, but "
                    f"found {show_keys(tensordict.keys(True, True))}. The network "
                    "before the head, or the environment, must write it."
                )
            parameters[name] = value
        return self.distribution(**parameters)

    build_dist_from_params = get_dist

    def sample_from_noise(
        self, tensordict: TensorDictBase, noise: Tensor
    ) -> TensorDictBase:
        """Sample actions from ``noise`` and write the same keys as a call of the head.

        Args:
            tensordict: contains the distribution's parameters.
            noise: ``[*B, n_agents, noise_size]`` of kind ``noise_kind``.

        Returns:
            ``tensordict``, with the actions.
        """
        dist = self.get_dist(tensordict)
        action = dist.sample_from_noise(noise)
        tensordict.set(self.dist_sample_keys[0], action)
        if self.return_log_prob:
            tensordict.set(self.log_prob_key, dist.log_prob(action))
        return tensordict

    def _dist_sample(
        self,
        dist: ActionDistribution,
        interaction_type: InteractionType | None = None,
        **options: Any,
    ) -> Tensor:
        chosen = interaction_type or self.default_interaction_type
        if self.noise is not None and chosen is InteractionType.RANDOM:
            return dist.sample_from_noise(self.noise)
        if chosen is InteractionType.MEAN and not dist.has_rsample:
            raise NotImplementedError(
                f"Group {self.group!r} has discrete actions, which have no mean: use "
                "InteractionType.MODE or DETERMINISTIC."
            )
        sample: Tensor = super()._dist_sample(dist, interaction_type, **options)
        return sample


def show_keys(keys: Iterable[str | tuple[str, ...]]) -> str:
    """Format nested keys as sorted paths, for messages."""
    return ", ".join(sorted("/".join(key_path(key)) for key in keys)) or "nothing"


@final
class CategoricalHead(ActionHead):
    """One of ``n_actions`` per agent: int64 actions ``[*B, n_agents]``.

    Reads ``(group, "logits")`` and, if ``mask`` is true, ``(group, "action_mask")``.

    Args:
        n_actions: number of actions.
        options: see ``HeadOptions``.
        mask: whether there is an action mask.
        check_mask: whether a row without a legal action is an error. The check waits
            for the device. Without it, the action of this row is 0.
        one_hot: whether actions are one-hot, ``[*B, n_agents, n_actions]``.
    """

    by_row = True
    noise_kind: NoiseKind = "gumbel"

    def __init__(
        self,
        n_actions: int,
        options: HeadOptions | None = None,
        *,
        mask: bool = False,
        check_mask: bool = True,
        one_hot: bool = False,
    ) -> None:
        keys = {"logits": "logits"} | ({"mask": "action_mask"} if mask else {})
        super().__init__(keys, options or HeadOptions())
        self.n_actions = n_actions
        self.check_mask = check_mask
        self.one_hot = one_hot
        self.n_outputs = n_actions
        self.noise_size = n_actions
        self.distribution_class = (
            MaskedOneHotCategorical if one_hot else MaskedCategorical
        )

    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        """Build the distribution from ``logits`` and, if there is one, ``mask``.

        Raises:
            ValueError: if a mask allows no action; names the first such agent.
        """
        mask = parameters.get("mask")
        if mask is not None and self.check_mask:
            self._check(mask)
        dist: ActionDistribution = self.distribution_class(**parameters)
        return dist

    def _check(self, mask: Tensor) -> None:
        if mask.is_meta or torch.compiler.is_compiling():
            return
        acts = mask.any(-1)
        if acts.all():
            return
        *batch, agent = (~acts).nonzero()[0].tolist()
        names = self.options.agents
        name = repr(names[agent]) if agent < len(names) else f"number {agent}"
        raise ValueError(
            f"The action mask of agent {name} of group {self.group!r} allows no action "
            f"(batch index {batch}). The mask of an agent that acts must allow at "
            "least one action, and that of an agent that does not act must allow all."
        )


@final
class MultiCategoricalHead(ActionHead):
    """``k`` independent choices per agent: int64 actions ``[*B, n_agents, k]``.

    Reads ``(group, "logits")``, ``[*B, n_agents, sum(nvec)]``.

    Args:
        nvec: number of options of each choice.
        options: see ``HeadOptions``.
    """

    by_row = True
    noise_kind: NoiseKind = "gumbel"

    def __init__(self, nvec: Sequence[int], options: HeadOptions | None = None) -> None:
        super().__init__({"logits": "logits"}, options or HeadOptions())
        self.nvec = tuple(int(n) for n in nvec)
        self.n_outputs = sum(self.nvec)
        self.noise_size = self.n_outputs
        self.distribution_class = MultiCategorical

    @override
    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        return MultiCategorical(parameters["logits"], self.nvec)


@final
class NormalHead(ActionHead):
    """``size`` unbounded numbers per agent: float actions ``[*B, n_agents, size]``.

    Reads ``(group, "loc")`` and ``(group, "scale")``; see ``LocScale``.

    Args:
        size: number of numbers per action.
        options: see ``HeadOptions``.
    """

    by_row = True
    needs_scale = True
    noise_kind: NoiseKind = "normal"

    def __init__(self, size: int, options: HeadOptions | None = None) -> None:
        super().__init__({"loc": "loc", "scale": "scale"}, options or HeadOptions())
        self.n_outputs = 2 * size
        self.noise_size = size
        self.distribution_class = IndependentNormal

    @override
    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        return IndependentNormal(**parameters)


@final
class TanhNormalHead(ActionHead):
    """``k`` bounded numbers per agent: float actions ``[*B, n_agents, k]``.

    Reads ``(group, "loc")`` and ``(group, "scale")``, which apply before squashing.

    Args:
        low: lower bound of each number.
        high: upper bound of each number.
        options: see ``HeadOptions``.

    Raises:
        ValueError: if a bound is not finite, or a lower bound is not below the upper.
    """

    by_row = True
    needs_scale = True
    noise_kind: NoiseKind = "normal"
    low: Tensor
    high: Tensor

    def __init__(
        self,
        low: Sequence[float],
        high: Sequence[float],
        options: HeadOptions | None = None,
    ) -> None:
        super().__init__({"loc": "loc", "scale": "scale"}, options or HeadOptions())
        self.bounds = tuple(
            (float(a), float(b)) for a, b in zip(low, high, strict=True)
        )
        wrong = [
            (a, b) for a, b in self.bounds if not float("-inf") < a < b < float("inf")
        ]
        if wrong:
            raise ValueError(
                f"TanhNormalHead of group {self.group!r} needs finite bounds, lower "
                f"below upper, but found {wrong}. For unbounded actions use NormalHead."
            )
        self.n_outputs = 2 * len(self.bounds)
        self.noise_size = len(self.bounds)
        self.distribution_class = TanhNormal
        # Buffers, so that .to() moves them. The environment defines them, so they are
        # not saved.
        self.register_buffer("low", torch.empty(self.noise_size), persistent=False)
        self.register_buffer("high", torch.empty(self.noise_size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the bounds to their buffers."""
        for index, (low, high) in enumerate(self.bounds):
            self.low[index] = low
            self.high[index] = high

    @override
    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        return TanhNormal(**parameters, low=self.low, high=self.high)
