"""From a network's outputs to the actions of a group, and their log-probabilities.

A head is the last module of a policy. It reads the distribution's parameters under the
group's keys and writes ``(group, "action")`` and ``(group, "action_log_prob")``; how it
chooses follows tensordict's interaction type (``set_interaction_type``).
"""

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from torch import Tensor

from marl_collect.models.distributions.base import ActionDistribution, NoiseKind
from marl_collect.models.distributions.categorical import (
    MaskedCategorical,
    MaskedOneHotCategorical,
    MultiCategorical,
)
from marl_collect.models.distributions.normal import IndependentNormal, TanhNormal


@dataclass(frozen=True)
class HeadOptions:
    """What all heads let one choose.

    Attributes:
        group: where the keys live: ``(group, "action")`` and so on.
        agents: names of the agents, in the order of their rows, for messages.
        return_log_prob: whether ``(group, "action_log_prob")`` is written, ``[*B, n]``.
        default_interaction_type: how to choose where no ``set_interaction_type`` says
            so. Collectors always do.
    """

    group: str = "agents"
    agents: tuple[str, ...] = ()
    return_log_prob: bool = True
    default_interaction_type: InteractionType = InteractionType.DETERMINISTIC


class ActionHead(ProbabilisticTensorDictModule, abc.ABC):
    """Base of the heads.

    Noise from outside: a caller that draws its own numbers (a worker, with a generator
    per environment) puts them into ``noise``; they then stand in for torch's global
    generator, and mean the same actions on every call.

    Attributes:
        group: whose actions these are.
        n_outputs: how many numbers per agent the network before the head computes.
        needs_scale: whether ``LocScale`` must split them into means and deviations.
        noise_kind: the noise that one action takes, standard Gumbel or normal ...
        noise_size: ... and how many numbers of it, for each agent.
        noise: ``[*B, n_agents, noise_size]`` to draw from, or ``None``.
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
        """Read the ``parameters`` of the distribution, name to key, from the group."""
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
            KeyError: naming the key that is missing.
        """
        parameters: dict[str, Tensor] = {}
        for name, key in zip(self.dist_keys, self.in_keys, strict=True):
            value = tensordict.get(key, None)
            if value is None:
                raise KeyError(
                    f"The head of group {self.group!r} needs {show_keys([key])}, but "
                    f"found {show_keys(tensordict.keys(True, True))}. The network "
                    "before it, or the environment, must write it."
                )
            parameters[name] = value
        return self.distribution(**parameters)

    build_dist_from_params = get_dist

    def sample_from_noise(
        self, tensordict: TensorDictBase, noise: Tensor
    ) -> TensorDictBase:
        """Choose actions from ``noise``, and write what calling the head writes.

        Args:
            tensordict: holds the distribution's parameters.
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
                f"Group {self.group!r} has discrete actions, which have no mean: "
                "choose InteractionType.MODE or DETERMINISTIC."
            )
        sample: Tensor = super()._dist_sample(dist, interaction_type, **options)
        return sample


def show_keys(keys: Iterable[str | tuple[str, ...]]) -> str:
    """Write nested keys as paths, sorted, for messages."""
    paths = ["/".join((key,) if isinstance(key, str) else key) for key in keys]
    return ", ".join(sorted(paths)) or "nothing"


@final
class CategoricalHead(ActionHead):
    """One of ``n_actions`` per agent: int64 actions ``[*B, n_agents]``.

    Reads ``(group, "logits")`` and, if ``mask`` is true, ``(group, "action_mask")``.

    Args:
        n_actions: how many actions there are.
        options: see ``HeadOptions``.
        mask: whether only actions of the mask may be taken.
        check_mask: whether a row without a legal action is an error. The check waits
            for the device; without it such a row takes action 0.
        one_hot: whether actions are written as rows of 0 and 1,
            ``[*B, n_agents, n_actions]``.
    """

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
        """Build the distribution from ``logits`` and, maybe, ``mask``.

        Raises:
            ValueError: naming the first agent whose mask allows no action.
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
            f"(batch index {batch}). An environment must allow an agent that acts at "
            "least one, and one that does not act all."
        )


@final
class MultiCategoricalHead(ActionHead):
    """``k`` independent choices per agent: int64 actions ``[*B, n_agents, k]``.

    Reads ``(group, "logits")``, ``[*B, n_agents, sum(nvec)]``.

    Args:
        nvec: number of options of each choice.
        options: see ``HeadOptions``.
    """

    noise_kind: NoiseKind = "gumbel"

    def __init__(self, nvec: Sequence[int], options: HeadOptions | None = None) -> None:
        super().__init__({"logits": "logits"}, options or HeadOptions())
        self.nvec = tuple(int(n) for n in nvec)
        self.n_outputs = sum(self.nvec)
        self.noise_size = self.n_outputs
        self.distribution_class = MultiCategorical

    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        """Build the distribution from ``logits``."""
        return MultiCategorical(parameters["logits"], self.nvec)


@final
class NormalHead(ActionHead):
    """``size`` unbounded numbers per agent: actions ``[*B, n_agents, size]``.

    Reads ``(group, "loc")`` and ``(group, "scale")``; see ``LocScale``.

    Args:
        size: numbers per action.
        options: see ``HeadOptions``.
    """

    needs_scale = True
    noise_kind: NoiseKind = "normal"

    def __init__(self, size: int, options: HeadOptions | None = None) -> None:
        super().__init__({"loc": "loc", "scale": "scale"}, options or HeadOptions())
        self.n_outputs = 2 * size
        self.noise_size = size
        self.distribution_class = IndependentNormal

    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        """Build the distribution from ``loc`` and ``scale``."""
        return IndependentNormal(**parameters)


@final
class TanhNormalHead(ActionHead):
    """Numbers between bounds: actions ``[*B, n_agents, k]``.

    Reads ``(group, "loc")`` and ``(group, "scale")``, of the numbers before squashing.

    Args:
        low: lower bound of each number.
        high: upper bound of each number.
        options: see ``HeadOptions``.

    Raises:
        ValueError: if a bound is not finite, or not below its upper bound.
    """

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
                f"below upper, but found {wrong}. Use NormalHead where there are none."
            )
        self.n_outputs = 2 * len(self.bounds)
        self.noise_size = len(self.bounds)
        self.distribution_class = TanhNormal
        # Buffers, so that they follow .to(); known from the environment, so not saved.
        self.register_buffer("low", torch.empty(self.noise_size), persistent=False)
        self.register_buffer("high", torch.empty(self.noise_size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the bounds into their buffers."""
        for index, (low, high) in enumerate(self.bounds):
            self.low[index] = low
            self.high[index] = high

    def distribution(self, **parameters: Tensor) -> ActionDistribution:
        """Build the distribution from ``loc`` and ``scale``."""
        return TanhNormal(**parameters, low=self.low, high=self.high)
