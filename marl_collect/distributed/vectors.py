"""Weights in Ray's object store: stored once per version, shared by all readers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch

from marl_collect.collectors.broadcaster import WeightBroadcaster, WeightUpdate
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.distributed.messages import Bytes
from marl_collect.distributed.results import FETCH_SECONDS
from marl_collect.weights.module_settings import Settings
from marl_collect.weights.shared import WeightLayout

Chosen = tuple[int, ...] | None
"""Workers of an actor, None for all of them."""


@final
@dataclass(frozen=True, eq=False)
class Stored:
    """Weights in the store; compared by identity.

    Attributes:
        reference: Ray's reference to the vector; None without weights.
        version: of the weights.
        settings: settings of the policy that have changed since the start.
    """

    reference: Any
    version: int = 0
    settings: Settings | None = None


@final
class StoredWeights(WeightBroadcaster):
    """Knows the weights that each worker of each actor uses from its next order on.

    All workers share one object until some of them get weights of their own. An object
    is dropped from the store when no worker uses it any more.

    Attributes:
        each: number of workers of each actor.
    """

    def __init__(
        self,
        ray: Any,
        policy: TrainerPolicy,
        actors: Callable[[], Sequence[int]],
        workers: int,
    ) -> None:
        """Store nothing yet.

        Args:
            ray: the module ``ray``.
            policy: the trainer's policy.
            actors: returns the indices of the current actors.
            workers: number of workers of each actor.
        """
        super().__init__(policy)
        self._actors = actors
        self._ray = ray
        self.each = workers
        self._staged: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._common = Stored(None)
        self._own: dict[int, list[Stored]] = {}

    @property
    def workers(self) -> int:
        """Number of workers, over all actors."""
        return len(self._actors()) * self.each

    # Starting

    def begin(self) -> None:
        """Put the weights of the trainer's module into the store, if it has any."""
        layout = self.policy.layout
        if layout is not None:
            self._stage(layout)
            self._common = self._put(self.policy.tensors(), 0, None)

    def adopt(self, layout: WeightLayout, vectors: Mapping[int, list[Bytes]]) -> None:
        """Use weights that actors have built as version 0.

        Args:
            layout: of the vectors.
            vectors: of each actor's workers; a single vector is shared by all.
        """
        self.policy.use_layout(layout)
        self._stage(layout)
        each = [vector for own in vectors.values() for vector in own]
        self._common = Stored(self._ray.put(each[0]))
        if len(each) > 1:
            for actor, own in vectors.items():
                self._own[actor] = [Stored(self._ray.put(vector)) for vector in own]

    # Orders

    def of(self, actor: int) -> list[Stored]:
        """Return the weights for each of an actor's workers; [] without weights."""
        if self._staged is None:
            return []
        return list(self._own.get(actor, [self._common] * self.each))

    def forget(self, actor: int) -> None:
        """Drop the weights that only this actor, which is gone, had."""
        self._own.pop(actor, None)

    def close(self) -> None:
        """Drop everything from the store."""
        self._common = replace(self._common, reference=None)
        self._own.clear()

    # Publishing

    def versions(self) -> list[int]:
        """Return the version that each worker uses from its next order on."""
        found = [stored.version for stored in self._everyone()]
        return found or [self.version] * self.workers

    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return each worker's weights by name; equal weights share one dict."""
        everyone = self._everyone()
        layout = self.policy.layout
        if layout is None or not everyone:
            return []
        different = list(dict.fromkeys(everyone))
        references = [stored.reference for stored in different]
        vectors = self._ray.get(references, timeout=FETCH_SECONDS)
        found = {
            stored: dict(
                zip(
                    layout.names,
                    layout.views(torch.from_numpy(np.array(vector))),
                    strict=True,
                )
            )
            for stored, vector in zip(different, vectors, strict=True)
        }
        return [found[stored] for stored in everyone]

    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        if self._staged is None:
            raise RuntimeError("The policy has no weights to update.")
        settings = self.policy.settings()
        for part in parts:
            stored = self._put(part.tensors, part.version, settings)
            if part.workers is None:
                self._common = stored
                self._own.clear()
                continue
            for worker in part.workers:
                index, place = divmod(worker, self.each)
                actor = self._actors()[index]
                own = self._own[actor] = self.of(actor)
                own[place] = stored

    def _everyone(self) -> list[Stored]:
        return [stored for actor in self._actors() for stored in self.of(actor)]

    def _stage(self, layout: WeightLayout) -> None:
        self._staged = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self._views = layout.views(self._staged)

    def _put(
        self,
        tensors: Sequence[torch.Tensor],
        version: int,
        settings: Settings | None,
    ) -> Stored:
        assert self._staged is not None
        if self._views:  # A module may have no weights at all.
            with torch.no_grad():
                torch._foreach_copy_(self._views, [t.detach() for t in tensors])
        return Stored(self._ray.put(self._staged.numpy()), version, settings)


def changed(
    has: Sequence[Stored | None], wants: Sequence[Stored]
) -> list[tuple[Chosen, Stored]]:
    """Return the weights that an actor lacks, and which workers they are for.

    Args:
        has: the weights last sent to each of its workers.
        wants: the weights that each of them is to act with; empty without weights.
    """
    if not wants:
        return []
    if all(wanted is wants[0] for wanted in wants):
        return [] if all(had is wants[0] for had in has) else [(None, wants[0])]
    out: list[tuple[Chosen, Stored]] = []
    for stored in dict.fromkeys(wants):
        workers = tuple(w for w, wanted in enumerate(wants) if wanted is stored)
        if any(has[worker] is not stored for worker in workers):
            out.append((workers, stored))
    return out
