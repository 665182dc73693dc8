"""Distributions of continuous actions: normal, and normal squashed into bounds."""

import math
from typing import cast

import torch
from torch import Tensor
from torch.distributions import constraints

from marl_collect.models.distributions.base import ActionDistribution, NoiseKind

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# Number of halvings that reach the resolution of float32.
_BISECTIONS = 40


class IndependentNormal(ActionDistribution):
    """A normal distribution over ``k`` independent numbers per agent.

    Args:
        loc: means, ``[*B, n_agents, k]``.
        scale: standard deviations, of the same shape.
    """

    noise_kind: NoiseKind = "normal"
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc = loc
        self.scale = scale
        super().__init__(loc, loc.shape[-1:])

    def sample_from_noise(self, noise: Tensor) -> Tensor:
        """Return actions ``[*sample_shape, *B, n_agents, k]``."""
        return torch.addcmul(self.loc, self.scale, noise)

    @property
    def mean(self) -> Tensor:
        """``loc``, which is mode and median too."""
        return self.loc

    mode = median = mean

    @property
    def variance(self) -> Tensor:
        """``scale`` squared."""
        return self.scale.square()

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of actions ``[*, n_agents, k]``."""
        return _normal_log_prob(value, self.loc, self.scale).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy, ``[*B, n_agents]``."""
        return (self.scale.log() + (0.5 + _LOG_SQRT_2PI)).sum(-1)


class NoClosedFormError(NotImplementedError, AttributeError):
    """A property of a distribution is not known in closed form.

    It is an ``AttributeError`` for ``hasattr``, with which tensordict before 0.12 asks.
    """


class TanhNormal(ActionDistribution):
    """A normal distribution squashed into bounds: ``low + (high - low)(1 + tanh x)/2``.

    Its entropy has no closed form; losses estimate it from samples.

    Args:
        loc: means before squashing, ``[*B, n_agents, k]``.
        scale: standard deviations before squashing, of the same shape.
        low: lower bounds, ``[k]`` or a number.
        high: upper bounds, ``[k]`` or a number.
    """

    noise_kind: NoiseKind = "normal"
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
    ) -> None:
        self.loc = loc
        self.scale = scale
        self.low = torch.as_tensor(low, dtype=loc.dtype, device=loc.device)
        self.high = torch.as_tensor(high, dtype=loc.dtype, device=loc.device)
        self._half = (self.high - self.low) / 2
        self._middle = self.low + self._half
        super().__init__(loc, loc.shape[-1:])

    @property
    def support(self) -> constraints.Constraint:
        """The bounds."""
        bounds = constraints.interval(self.low, self.high)
        return cast(constraints.Constraint, constraints.independent(bounds, 1))

    def _squash(self, x: Tensor) -> Tensor:
        # Rounding may exceed a bound by one unit in the last place.
        squashed = torch.addcmul(self._middle, self._half, x.tanh())
        return squashed.clamp(self.low, self.high)

    def sample_from_noise(self, noise: Tensor) -> Tensor:
        """Return actions ``[*sample_shape, *B, n_agents, k]``."""
        return self._squash(torch.addcmul(self.loc, self.scale, noise))

    @property
    def median(self) -> Tensor:
        """The squashed ``loc``, because squashing is monotonic."""
        return self._squash(self.loc)

    deterministic_sample = median

    @property
    def mode(self) -> Tensor:
        """The action with the highest density, found by bisection.

        With ``x`` before squashing, the log-density is stationary where
        ``x = loc + 2 scale^2 tanh x``. The maximum is the only solution between ``loc``
        and ``2 scale^2`` beyond ``loc``, away from zero.
        """
        loc, spread = self.loc.abs(), 2 * self.scale.square()
        inner, outer = loc, loc + spread
        for _ in range(_BISECTIONS):
            middle = (inner + outer) / 2
            beyond = loc + spread * middle.tanh() > middle
            inner = torch.where(beyond, middle, inner)
            outer = torch.where(beyond, outer, middle)
        return self._squash(torch.copysign((inner + outer) / 2, self.loc))

    @property
    def mean(self) -> Tensor:
        """Has no closed form; tensordict's modules estimate it from samples."""
        raise NoClosedFormError("The mean of TanhNormal has no closed form.")

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of actions ``[*, n_agents, k]`` within the bounds.

        An action on a bound is replaced by the nearest one inside, because the density
        on the bound is not finite. Collection and training both invert the squashed
        action, so their results are equal.
        """
        half = self._half
        eps = torch.finfo(value.dtype).eps
        squashed = torch.addcmul(-self._middle / half, value, 1 / half)
        squashed = squashed.clamp(-1 + eps, 1 - eps)
        # With y = tanh x: x = (log(1 + y) - log(1 - y)) / 2, and the slope of tanh at x
        # is (1 + y)(1 - y). Logarithms are bitwise equal for any number of rows;
        # atanh() and softplus() are not. Constant terms are summed first.
        above, below = squashed.log1p(), squashed.neg().log1p()
        twice_z = (above - below).sub(self.loc, alpha=2) / self.scale
        density = (-_LOG_SQRT_2PI - half.log()) - self.scale.log()
        density = torch.addcmul(density, twice_z, twice_z, value=-0.125)
        return (density - above - below).sum(-1)


def _normal_log_prob(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    z = (value - loc) / scale
    # As few operations as possible: for one frame, each costs more than its arithmetic.
    return torch.addcmul(-_LOG_SQRT_2PI - scale.log(), z, z, value=-0.5)
