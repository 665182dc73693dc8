"""Weights in Ray's object store: stored once per version, shared by all readers.

On its node, a worker has a vector in shared memory. The relay writes the weights there,
and the worker reads them like those of a local trainer.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from marl_collect.distributed.relay import Bytes
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.shared import WeightVector

FETCH_SECONDS = 60.0
"""Timeout for an object that Ray reports as available."""


@final
@dataclass(frozen=True, eq=False)
class NodeVector:
    """A worker's vector on its node, whose memory the pool reserves.

    Attributes:
        layout: of the vector.
        reference: to the weights that are written there before the worker reads.
        into: memory of the trainer for what the worker publishes.
    """

    layout: WeightLayout
    reference: Any = None
    into: Bytes | None = None

    @property
    def written(self) -> tuple[Any, ...]:
        """The reference, if there is one."""
        return () if self.reference is None else (self.reference,)


@final
class RayVector(WeightVector):
    """Weights in the object store, not in shared memory. Every version is a new slot.

    An object is dropped from the store when no worker uses it any more.
    """

    def __init__(self, layout: WeightLayout, ray: Any) -> None:
        """Store nothing yet.

        Args:
            layout: of the weights.
            ray: the module ``ray``.
        """
        super().__init__(layout)
        self._ray = ray
        self._owner = os.getpid()
        self._staged = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
        self._staged_parts = self._targets_in(self._staged)
        self._references: dict[int, Any] = {}
        self._slots = 0

    def write(self, tensors: Sequence[torch.Tensor], used: Iterable[int]) -> int:
        """Store weights, and drop those in slots that are not used."""
        self._copy(tensors, self._staged_parts)
        return self._put(used)

    def tensors(self, weights_slot: int) -> Sequence[torch.Tensor]:
        """Return the weights in a slot."""
        stored = self._ray.get(self._references[weights_slot], timeout=FETCH_SECONDS)
        return self._layout.views(torch.from_numpy(np.array(stored)))

    def handle(self, weights_slot: int) -> NodeVector:
        """Return a worker's vector, with the weights that are written there."""
        return NodeVector(self._layout, self._references[weights_slot])

    def filled(self, call: Callable[..., Any], worker: int) -> int:
        """Store a worker's own weights; return their slot."""
        vector = NodeVector(self._layout, into=self._staged.numpy())
        call("publish_weights", self._slots, vector, workers=[worker])
        return self._put(self._references)

    def close(self) -> None:
        """Drop all weights from the store."""
        # Ray's locks may be held by threads that a fork of this process does not have.
        if os.getpid() == self._owner:
            self._references.clear()

    def _put(self, used: Iterable[int]) -> int:
        reference = self._ray.put(self._staged.numpy())
        weights_slot, self._slots = self._slots, self._slots + 1
        references = {number: self._references[number] for number in used}
        self._references = {**references, weights_slot: reference}
        return weights_slot
