"""Measures a learner: parameters, memory, and the time of one gradient step."""

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from marl_collect.training.learner import Learner

_REPETITIONS = 15


@dataclass(frozen=True)
class Costs:
    """Costs of one learner.

    Attributes:
        policy_parameters: number of parameters of the policy.
        parameters: number of trained parameters, including critics and mixers.
        memory: bytes of weights, gradients, Adam's two moments, target networks, and
            tensors that the backward pass of one minibatch needs.
        forward_ms: time of one minibatch's loss, in milliseconds.
        backward_ms: time of its gradient, in milliseconds.
        minibatch_frames: frames in that minibatch.
    """

    policy_parameters: int
    parameters: int
    memory: int
    forward_ms: float
    backward_ms: float
    minibatch_frames: int


def measure(learner: Learner, batch: TensorDictBase) -> Costs:
    """Measure a learner on a minibatch of ``batch``, without changing its weights.

    Times are medians of several repetitions, synchronised if the learner is on a GPU.
    """
    generator = learner.generator.get_state()
    noise = torch.get_rng_state()
    minibatch = learner.example(batch)
    saved = _saved_bytes(learner, minibatch)
    forward, backward = [], []
    for _ in range(_REPETITIONS):
        begin = _now(learner.device)
        loss, _logged = learner.loss(minibatch)
        middle = _now(learner.device)
        loss.backward()
        end = _now(learner.device)
        forward.append(middle - begin)
        backward.append(end - middle)
    learner.optimizer.zero_grad()
    learner.generator.set_state(generator)
    torch.set_rng_state(noise)
    trained = list(learner.parameters())
    weights = sum(p.numel() * p.element_size() for p in trained)
    kept = _nbytes(t for net in learner.unrolled.values() for t in _tensors(net))
    return Costs(
        policy_parameters=sum(p.numel() for p in learner.policy.parameters()),
        parameters=sum(p.numel() for p in trained),
        memory=4 * weights + kept + saved,
        forward_ms=round(statistics.median(forward) * 1e3, 3),
        backward_ms=round(statistics.median(backward) * 1e3, 3),
        minibatch_frames=minibatch.numel(),
    )


def _saved_bytes(learner: Learner, minibatch: TensorDictBase) -> int:
    """Count the bytes that the forward pass saves for the backward pass.

    Tensors that share a storage count once; the parameters' storages do not count.
    """
    own = {p.untyped_storage().data_ptr() for p in learner.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _logged = learner.loss(minibatch)
        total = sum(found.values())
        del loss
    return total


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
