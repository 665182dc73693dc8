"""Costs of a learner: parameters, memory, and the time of one gradient step.

The first gradient steps of the training are measured, so measuring takes no time.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_STEPS = 15


@dataclass(frozen=True)
class Costs:
    """Costs of one learner.

    Attributes:
        policy_parameters: number of parameters of the policy.
        parameters: number of trained parameters, including critics and mixers.
        memory: bytes of weights, gradients, Adam's two moments, target networks, and
            tensors that the backward pass of one minibatch needs.
        forward_ms: median time of one minibatch's loss, in milliseconds.
        backward_ms: median time of its gradient, in milliseconds.
        minibatch_frames: frames in that minibatch.
    """

    policy_parameters: int
    parameters: int
    memory: int
    forward_ms: float
    backward_ms: float
    minibatch_frames: int


@final
class StepMeter:
    """Measures the first gradient steps of a learner.

    Counting the saved tensors takes time, so the first step is timed only if there is
    no second one.

    Args:
        parameters: all trained parameters.
        device: of the learner; a GPU is synchronised before each reading of the clock.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in parameters}
        self._device = device
        self._saved: int | None = None
        self._frames = 0
        self._forward: list[float] = []
        self._backward: list[float] = []

    @property
    def complete(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._backward) > _STEPS

    @contextmanager
    def forward(self, frames: int) -> Iterator[None]:
        """Measure the forward pass of the context on a minibatch of ``frames``."""
        begin = self._now()
        if self._saved is None:
            storages: dict[int, int] = {}
            with saved_tensors_hooks(self._counting(storages), lambda tensor: tensor):
                yield
            self._saved, self._frames = sum(storages.values()), frames
        else:
            yield
        self._forward.append(self._now() - begin)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Measure the backward pass of the context, which follows its forward pass."""
        begin = self._now()
        yield
        self._backward.append(self._now() - begin)

    def costs(
        self, policy: nn.Module, trained: Iterable[Tensor], unrolled: Iterable[Tensor]
    ) -> Costs | None:
        """Return the costs, or None before the first gradient step.

        Args:
            policy: the policy that collectors use.
            trained: all trained parameters.
            unrolled: tensors of further networks, such as target networks.
        """
        if self._saved is None or not self._backward:
            return None
        trained = list(trained)
        forward, backward = (
            statistics.median(times[1:] or times) * 1e3
            for times in (self._forward, self._backward)
        )
        return Costs(
            policy_parameters=sum(p.numel() for p in policy.parameters()),
            parameters=sum(p.numel() for p in trained),
            memory=4 * _nbytes(trained) + _nbytes(unrolled) + self._saved,
            forward_ms=round(forward, 3),
            backward_ms=round(backward, 3),
            minibatch_frames=self._frames,
        )

    def _counting(self, storages: dict[int, int]) -> Callable[[Tensor], Tensor]:
        """Return a hook that notes the bytes of each storage but the parameters'."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        return pack

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
