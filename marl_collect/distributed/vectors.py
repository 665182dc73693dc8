"""Weights in Ray's object store: put there once per version, whoever reads them."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from marl_collect.distributed.messages import Bytes
from marl_collect.distributed.outcomes import FETCH_SECONDS
from marl_collect.weights import WeightLayout

Chosen = tuple[int, ...] | None
"""Workers of an actor, None for all of them."""


@final
class Vectors:
    """Knows which weights each worker of each actor acts with from its next order on.

    All workers share one object until weights are meant for some of them only. An
    object is dropped from the store when no worker is to use it any more.
    """

    def __init__(self, ray: Any, layout: WeightLayout, workers: int) -> None:
        """Hold nothing yet.

        Args:
            ray: the module.
            layout: of the vectors.
            workers: of each actor.
        """
        self.layout = layout
        self._ray = ray
        self._workers = workers
        self._staged = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._views = layout.views(self._staged)
        self._common: Any = None
        self._own: dict[int, list[Any]] = {}

    def of(self, actor: int) -> list[Any]:
        """Return the reference of each of an actor's workers."""
        return list(self._own.get(actor, [self._common] * self._workers))

    def read(self, actors: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return copies of the weights, one set if all workers have the same.

        Args:
            actors: in the order of their workers.
        """
        references = [reference for actor in actors for reference in self.of(actor)]
        if all(reference is references[0] for reference in references):
            references = references[:1]
        vectors = self._ray.get(references, timeout=FETCH_SECONDS)
        names, views = self.layout.names, self.layout.views
        return [
            dict(zip(names, views(torch.from_numpy(np.array(vector))), strict=True))
            for vector in vectors
        ]

    def publish(
        self,
        tensors: Sequence[torch.Tensor],
        chosen: Mapping[int, Sequence[int]] | None,
    ) -> None:
        """Put a new version into the store.

        Args:
            tensors: the weights, in the order of the layout, on any device.
            chosen: by actor, the workers that they are for; None for all.
        """
        with torch.no_grad():
            torch._foreach_copy_(self._views, [t.detach() for t in tensors])
        self.put(self._staged.numpy(), chosen)

    def put(
        self, vector: Bytes, chosen: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Put a vector into the store, for all workers or some."""
        reference = self._ray.put(vector)
        if chosen is None:
            self._common = reference
            self._own.clear()
        for actor, workers in (chosen or {}).items():
            own = self._own[actor] = self.of(actor)
            for worker in workers:
                own[worker] = reference

    def forget(self, actor: int) -> None:
        """Drop what only an actor that is gone had."""
        self._own.pop(actor, None)


def news(has: Sequence[Any], wants: Sequence[Any]) -> list[tuple[Chosen, Any]]:
    """Return which references have to be sent to an actor, and for which workers.

    Args:
        has: the reference that each of its workers was sent last.
        wants: the reference that each of them shall act with.
    """
    if all(wanted is wants[0] for wanted in wants):
        return [] if all(had is wants[0] for had in has) else [(None, wants[0])]
    out: list[tuple[Chosen, Any]] = []
    for reference in dict.fromkeys(wants):
        workers = tuple(w for w, wanted in enumerate(wants) if wanted is reference)
        if any(has[worker] is not reference for worker in workers):
            out.append((workers, reference))
    return out
