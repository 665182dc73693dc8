"""Random actions on the memory of a device."""

from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch

from marl_collect.core.description import EnvDescription, Key
from marl_collect.core.random_actions import draw, samplers
from marl_collect.core.signature import PolicySignature
from marl_collect.policies.runner import Generators, PolicyRunner


@final
class DeviceRandomRunner(PolicyRunner):
    """Takes the random actions of ``RandomRunner``.

    The noise of a slot is drawn on the host and copied once.
    """

    must_observe = False

    def __init__(self, description: EnvDescription) -> None:
        """Act in worlds of ``description``."""
        self._samplers = list(samplers(description))
        self._signature = PolicySignature(description.actions())
        self._slots: list[torch.Tensor] = []

    @property
    def signature(self) -> PolicySignature:
        """A signature with the actions as outputs."""
        return self._signature

    def bind(self, memory: Mapping[Key, Any]) -> None:
        """Write actions to ``memory``, tensors ``[K, ...]`` of a device."""
        self._memory = memory

    def begin(self, frames: int, generators: Generators) -> None:
        """Draw the noise of all frames, and all actions without an action mask."""
        self._slots = []
        for stream, sampler in enumerate(self._samplers):
            noise = draw(sampler, generators.of(stream), frames)
            target = self._memory[sampler.key]
            values, dtype = noise.swapaxes(0, 1), None
            if sampler.mask_key is None:
                values, dtype = sampler.actions(values), target.dtype
            there = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
            self._slots.append(there.to(target.device))

    def redraw(self, k: int, frame: int, generators: Generators) -> None:
        """Raise an error: only evaluations have episodes with seeds of their own."""
        raise NotImplementedError("Seeds of episodes are not given on a device.")

    def act(self, frame: int) -> None:
        """Write this frame's actions."""
        for sampler, values in zip(self._samplers, self._slots, strict=True):
            target = self._memory[sampler.key]
            if sampler.mask_key is None:
                target.copy_(values[frame])
                continue
            legal = self._memory[sampler.mask_key].cumsum(-1)
            wanted = (values[frame] * legal[..., -1]).to(torch.int64)
            index = (legal > wanted[..., None]).to(torch.uint8).argmax(-1)
            if sampler.one_hot:
                target.zero_().scatter_(-1, index[..., None], 1)
            else:
                target.copy_(index)

    def explain(self) -> str:
        """Return that actions are random."""
        return "Random actions, whose noise is drawn for a whole slot on the host."
