"""Weights in Ray's object store: stored once per version, shared by all readers.

There is one object for each policy, so what has not changed is neither stored nor sent
again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, final

import torch

from marl_collect.collectors.broadcaster import WeightBroadcaster, WeightUpdate
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.distributed.messages import Bytes, whole
from marl_collect.distributed.results import FETCH_SECONDS
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.weights.copies import WeightCopies
from marl_collect.weights.module_settings import Settings
from marl_collect.weights.shared import WeightLayout

Chosen = tuple[int, ...] | None
"""Workers of an actor, None for all of them."""


@final
@dataclass(frozen=True, eq=False)
class Stored:
    """Weights in the store; compared by identity.

    Attributes:
        references: Ray's references to the parts of the vector, in order.
        version: of the weights.
        settings: settings of the policy that have changed since the start.
    """

    references: tuple[Any, ...] = ()
    version: int = 0
    settings: Settings | None = None


@final
class StoredWeights(WeightBroadcaster):
    """Knows the weights that each worker of each actor uses from its next order on.

    All workers share one object until some of them get weights of their own. An object
    is dropped from the store when no worker uses it any more.

    Attributes:
        each: number of workers of each actor.
        parts: the tensors in each part of the vector.
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
        self._copies: WeightCopies
        self.parts: list[range] = []
        self._newest = self._common = Stored()
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
        own = {
            actor: [
                self._put(layout.views(torch.from_numpy(vector)), 0, None)
                for vector in each
            ]
            for actor, each in vectors.items()
        }
        self._common = next(iter(own.values()))[0]
        if sum(map(len, own.values())) > 1:
            self._own = own

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
        self._newest = self._common = replace(self._common, references=())
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
        found = {}
        for stored in different:
            parts = self._ray.get(list(stored.references), timeout=FETCH_SECONDS)
            views = layout.views(whole(layout, parts))
            found[stored] = dict(zip(layout.names, views, strict=True))
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
        self._copies = WeightCopies(layout.names, layout.views(self._staged))
        policy, names = self.policy.module, layout.names

        def owner(index: int) -> str:
            several = isinstance(policy, AssignedPolicies)
            return policy.owner(names[index]) if several else ""

        runs = [list(run) for _, run in groupby(range(len(names)), owner)]
        self.parts = [range(run[0], run[-1] + 1) for run in runs]

    def _put(
        self,
        tensors: Sequence[torch.Tensor],
        version: int,
        settings: Settings | None,
    ) -> Stored:
        """Store the parts that are not those of the newest weights."""
        assert self._staged is not None
        layout, copies = self.policy.layout, self._copies
        assert layout is not None
        copies.read(tensors)
        same = {index for index in layout.frozen if not copies.differ(0, index)}
        fresh = set(range(len(tensors))) - same
        references = list(self._newest.references) or [None] * len(self.parts)
        self._newest = Stored()  # Until all parts are stored.
        copies.write(0, fresh)
        for number, part in enumerate(self.parts):
            if references[number] is None or not fresh.isdisjoint(part):
                begin, end = layout.ends(part)
                references[number] = self._ray.put(self._staged[begin:end].numpy())
        self._newest = Stored(tuple(references), version, settings)
        return self._newest


def changed(
    has: Sequence[Stored | None], wants: Sequence[Stored]
) -> list[tuple[Chosen, Stored, list[int]]]:
    """Return the weights that an actor lacks.

    Args:
        has: the weights last sent to each of its workers.
        wants: the weights that each of them is to act with; empty without weights.

    Returns:
        Which workers they are for, the weights, and the numbers of the parts to send.
    """
    out: list[tuple[Chosen, Stored, list[int]]] = []
    for stored in dict.fromkeys(wants):
        workers = tuple(w for w, wanted in enumerate(wants) if wanted is stored)
        held = [had.references if had else () for had in (has[w] for w in workers)]
        if all(has[worker] is stored for worker in workers):
            continue
        parts = [
            number
            for number, reference in enumerate(stored.references)
            if any(not own or own[number] is not reference for own in held)
        ]
        out.append((None if len(workers) == len(wants) else workers, stored, parts))
    return out
