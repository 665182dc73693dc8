"""Noise for action heads, sampled from one generator per environment.

Heads with the attributes of ``NoisyHead`` receive their noise while a collector's
policy acts. It is sampled for a whole slot at once. The noise of an environment depends
neither on the assignment of environments to workers nor on the slot length.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, final, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from marl_collect.core.description import EnvDescription
from marl_collect.policies.runner import Generators

Kind = Literal["gumbel", "normal"]

FIRST_STREAM = 1000
"""Streams with lower numbers are for random actions."""


@runtime_checkable
class NoisyHead(Protocol):
    """A module that can sample actions from given noise.

    Attributes:
        group: the group whose actions it samples.
        noise_kind: standard Gumbel (always finite) or standard normal.
        noise_size: number of values for one action of one agent.
        noise: ``[K, n_agents, noise_size]``; None to use torch's generator.
    """

    group: str
    noise_kind: Kind
    noise_size: int
    noise: torch.Tensor | None


@final
class HeadNoise:
    """The noise of all heads of one policy, for K environments."""

    def __init__(self, policy: Any, description: EnvDescription, size: int) -> None:
        """Allocate one frame's noise for each head in ``policy``."""
        dtype = _dtype(policy)
        self.streams = [
            NoiseStream(head, FIRST_STREAM + number, (size, n_agents), dtype)
            for number, (head, n_agents) in enumerate(_heads(policy, description))
        ]

    def begin(self, frames: int, generators: Generators) -> None:
        """Sample the noise of the next ``frames`` frames, if actions are sampled."""
        draws = interaction_type() in (InteractionType.RANDOM, None)
        for stream in self.streams:
            stream.slot = None
            if draws:
                stream.draw(generators.of(stream.number), frames)

    def redraw(self, k: int, frame: int, generators: Generators) -> None:
        """Sample the noise of one environment anew, from a frame to the slot's end."""
        for stream in self.streams:
            if stream.slot is not None:
                stream.redraw(k, frame, generators.of(stream.number)[k])

    def load(self, frame: int) -> None:
        """Copy one frame's noise to the memory that the heads read."""
        for stream in self.streams:
            if stream.slot is not None:
                stream.array[...] = stream.slot[frame]

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the heads sample from this noise, until ``take_back``.

        Args:
            tensors: those of the streams, or their copies on the device of the heads.
        """
        for stream, tensor in zip(self.streams, tensors, strict=True):
            # vars() is faster: nn.Module.__setattr__ searches the parameters first.
            vars(stream.head)["noise"] = tensor

    def take_back(self) -> None:
        """Make the heads sample with torch's generator again, for other callers."""
        for stream in self.streams:
            vars(stream.head)["noise"] = None


@final
class NoiseStream:
    """The noise of one head.

    Attributes:
        head: the head.
        number: stream number of its generators.
        tensor: ``[K, n_agents, noise_size]``, noise of one frame.
        array: the same memory.
        slot: ``[frames, K, n_agents, noise_size]``, noise of a whole slot.
    """

    slot: NDArray[Any] | None = None

    def __init__(
        self, head: NoisyHead, number: int, batch: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """Allocate noise of one frame, filled with zeros."""
        self.head, self.number = head, number
        size = (*batch, head.noise_size)
        self.tensor = torch.empty(size, dtype=dtype, device="cpu")
        self.array: NDArray[Any] = self.tensor.numpy()
        self.array.fill(0.0)

    def draw(self, generators: list[np.random.Generator], frames: int) -> None:
        """Sample the noise of a slot, for each environment frame by frame."""
        rows = np.empty(
            (len(generators), frames, *self.array.shape[1:]), self.array.dtype
        )
        for generator, row in zip(generators, rows, strict=True):
            draw(self.head.noise_kind, generator, row)
        if self.head.noise_kind == "gumbel":
            rows = gumbel(rows)
        self.slot = np.ascontiguousarray(rows.swapaxes(0, 1))

    def redraw(self, k: int, frame: int, generator: np.random.Generator) -> None:
        """Sample the noise of one environment from ``frame`` to the slot's end."""
        assert self.slot is not None
        rest = self.slot[frame:, k]
        rest[...] = noise(
            self.head.noise_kind, generator, rest.shape, self.array.dtype.type
        )


def draw(kind: Kind, generator: np.random.Generator, out: NDArray[Any]) -> None:
    """Fill ``out``, float32 or float64; the values for Gumbel noise are exponential."""
    fill: Any = generator.standard_normal
    if kind == "gumbel":
        fill = generator.standard_exponential
    fill(out=out, dtype=out.dtype.type)


def gumbel(exponential: NDArray[Any]) -> NDArray[Any]:
    """Return Gumbel noise, always finite, for standard exponential noise."""
    tiny = np.finfo(exponential.dtype).tiny
    noise: NDArray[Any] = -np.log(np.maximum(exponential, tiny))
    return noise


def noise(
    kind: Kind, generator: np.random.Generator, shape: tuple[int, ...], dtype: Any
) -> NDArray[Any]:
    """Sample noise of float32 or float64."""
    out = np.empty(shape, dtype)
    draw(kind, generator, out)
    return gumbel(out) if kind == "gumbel" else out


def _heads(policy: Any, description: EnvDescription) -> Iterator[tuple[NoisyHead, int]]:
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if isinstance(module, NoisyHead) and module.group in description.groups:
            yield module, description.groups[module.group].n_agents


def _dtype(policy: Any) -> torch.dtype:
    """Return the floating-point dtype in which the policy computes."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else ()
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if wide else torch.float32
