"""Base class of action distributions.

Parameters are ``[*B, n_agents, features]``. Arguments are not validated, because the
checks of ``torch.distributions`` cost more than the arithmetic. Distributions can
sample from noise that the caller provides, so that a worker can use a separate random
generator for every environment.
"""

import abc
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, constraints

NoiseKind = Literal["gumbel", "normal"]


class ActionDistribution(Distribution, abc.ABC):
    """A distribution that the heads of this package can use.

    Attributes:
        noise_kind: noise that ``sample_from_noise`` takes: standard Gumbel (always
            finite) or standard normal.
    """

    pure_forward = True

    noise_kind: NoiseKind
    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 - torch's name

    def __init__(self, parameter: Tensor, event_shape: Sequence[int] = ()) -> None:
        """Set the shapes.

        Args:
            parameter: ``[*B, n_agents, features]``; has the shape, dtype and device of
                the noise of one sample.
            event_shape: shape of one agent's action.
        """
        self._parameter = parameter
        super().__init__(parameter.shape[:-1], Size(event_shape), validate_args=False)

    @property
    def noise_shape(self) -> Size:
        """Shape of the noise of one sample."""
        return self._parameter.shape

    @abc.abstractmethod
    def sample_from_noise(self, noise: Tensor) -> Tensor:
        """Convert noise ``[*sample_shape, *noise_shape]`` to samples."""

    @property
    def deterministic_sample(self) -> Tensor:
        """The action without exploration; the mode, unless a subclass has another."""
        return self.mode

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample with torch's global generator and gradients."""
        if not self.has_rsample:
            raise NotImplementedError(
                f"{type(self).__name__} is discrete: it has no rsample()."
            )
        return self.sample_from_noise(self._draw(sample_shape))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample with torch's global generator, without gradients."""
        with torch.no_grad():
            return self.sample_from_noise(self._draw(sample_shape))

    def _draw(self, sample_shape: Sequence[int]) -> Tensor:
        like = self._parameter
        shape = (*sample_shape, *self.noise_shape)
        noise = torch.empty(shape, dtype=like.dtype, device=like.device)
        if self.noise_kind == "normal":
            return noise.normal_()
        # An exponential of 0 would give an infinity, and NaN if a logit is -inf.
        tiny = torch.finfo(like.dtype).tiny
        return noise.exponential_().clamp_(min=tiny).log_().neg_()
