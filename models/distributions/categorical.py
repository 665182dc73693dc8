"""Distributions of discrete actions, with action masks or several choices per agent."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from marl_collect.models.distributions.base import ActionDistribution, NoiseKind


class MaskedCategorical(ActionDistribution):
    """One of ``n_actions`` per agent; actions outside the mask have probability 0.

    The sample is the action with the highest sum of logit and Gumbel noise. An illegal
    action has the logit ``-inf``, so it is never sampled, regardless of rounding.

    Args:
        logits: ``[*B, n_agents, n_actions]``.
        mask: legal actions, bool, of the same shape; ``None`` allows all.
    """

    noise_kind: NoiseKind = "gumbel"
    has_enumerate_support = True

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        if mask is not None:
            logits = torch.where(mask, logits, -math.inf)
        self._normalised: Tensor | None = None
        super().__init__(logits)

    @property
    def logits(self) -> Tensor:
        """Log-probabilities ``[*B, n_agents, n_actions]``; ``-inf`` where illegal."""
        if self._normalised is None:
            self._normalised = self._parameter.log_softmax(-1)
        return self._normalised

    @property
    def probs(self) -> Tensor:
        """Probabilities ``[*B, n_agents, n_actions]``."""
        return self._parameter.softmax(-1)

    def sample_from_noise(self, noise: Tensor) -> Tensor:
        """Return int64 actions ``[*sample_shape, *B, n_agents]``."""
        return (self._parameter + noise).argmax(-1)

    @property
    def mode(self) -> Tensor:
        """The most probable action."""
        return self._parameter.argmax(-1)

    @property
    def mean(self) -> Tensor:
        """Not defined, because the mean of action numbers is not an action."""
        raise NotImplementedError("A categorical distribution has no mean action.")

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of actions ``[*, n_agents]``."""
        logits = self.logits
        if value.ndim != logits.ndim - 1:
            logits = logits.expand(*value.shape, logits.shape[-1])
        return logits.gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy over the legal actions, ``[*B, n_agents]``."""
        logits = self.logits
        # 0 * -inf is NaN, but 0 times the lowest finite number is 0.
        finite = logits.clamp(min=torch.finfo(logits.dtype).min)
        return -(logits.exp() * finite).sum(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All actions, ``[n_actions, *B, n_agents]``."""
        n_actions = self._parameter.shape[-1]
        values = torch.arange(n_actions, device=self._parameter.device)
        values = values.view(-1, *(1 for _ in self.batch_shape))
        return values.expand(-1, *self.batch_shape) if expand else values


class MaskedOneHotCategorical(ActionDistribution):
    """``MaskedCategorical`` with one-hot actions, int64."""

    noise_kind: NoiseKind = "gumbel"

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        self._categorical = MaskedCategorical(logits, mask)
        super().__init__(logits, logits.shape[-1:])

    @property
    def logits(self) -> Tensor:
        """Log-probabilities ``[*B, n_agents, n_actions]``."""
        return self._categorical.logits

    @property
    def probs(self) -> Tensor:
        """Probabilities ``[*B, n_agents, n_actions]``."""
        return self._categorical.probs

    def sample_from_noise(self, noise: Tensor) -> Tensor:
        """Return one-hot actions ``[*sample_shape, *B, n_agents, n_actions]``."""
        return self._one_hot(self._categorical.sample_from_noise(noise))

    def _one_hot(self, action: Tensor) -> Tensor:
        # F.one_hot() checks the values, for which it waits for the device.
        numbers = torch.arange(self.noise_shape[-1], device=action.device)
        return (action.unsqueeze(-1) == numbers).long()

    @property
    def mode(self) -> Tensor:
        """The most probable action."""
        return self._one_hot(self._categorical.mode)

    @property
    def mean(self) -> Tensor:
        """The probabilities."""
        return self.probs

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of one-hot actions ``[*, n_agents, n_actions]``."""
        return self._categorical.log_prob(value.argmax(-1))

    def entropy(self) -> Tensor:
        """Entropy over the legal actions, ``[*B, n_agents]``."""
        return self._categorical.entropy()


class MultiCategorical(ActionDistribution):
    """``k`` independent choices per agent, of ``nvec[0], ..., nvec[k-1]`` options.

    Args:
        logits: concatenated logits of the choices, ``[*B, n_agents, sum(nvec)]``.
        nvec: number of options of each choice.
    """

    noise_kind: NoiseKind = "gumbel"

    def __init__(self, logits: Tensor, nvec: Sequence[int]) -> None:
        self._nvec = tuple(nvec)
        parts = logits.split(self._nvec, -1)
        self._choices = [MaskedCategorical(part) for part in parts]
        super().__init__(logits, [len(self._nvec)])

    def sample_from_noise(self, noise: Tensor) -> Tensor:
        """Return int64 actions ``[*sample_shape, *B, n_agents, k]``."""
        parts = noise.split(self._nvec, -1)
        pairs = zip(self._choices, parts, strict=True)
        return torch.stack([c.sample_from_noise(part) for c, part in pairs], -1)

    @property
    def mode(self) -> Tensor:
        """The most probable option of each choice."""
        return torch.stack([choice.mode for choice in self._choices], -1)

    @property
    def mean(self) -> Tensor:
        """Not defined, because the mean of option numbers is not an option."""
        raise NotImplementedError("A categorical distribution has no mean action.")

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of actions ``[*, n_agents, k]``."""
        pairs = zip(self._choices, value.unbind(-1), strict=True)
        return torch.stack([c.log_prob(v) for c, v in pairs], -1).sum(-1)

    def entropy(self) -> Tensor:
        """Sum of the choices' entropies, ``[*B, n_agents]``."""
        return torch.stack([c.entropy() for c in self._choices], -1).sum(-1)
