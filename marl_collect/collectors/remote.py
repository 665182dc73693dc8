"""A collector that something else drives, batch by batch: on another node, say.

Whoever drives it calls what the collector's own iterator would, and decides alone what
becomes of a filled slot. See ``marl_collect.distributed``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch

from marl_collect.buffers.layout import Layout
from marl_collect.collectors.batches import Filled
from marl_collect.rollout.episodes import Plan


@final
@dataclass(frozen=True)
class Place:
    """Where a collector's environments stand among those of several collectors.

    Attributes:
        first: index of its first environment.
        episodes: number of the last episode that each environment began in a
            collector that this one replaces; () if it replaces none.
        generation: how often the collector was started anew.
        given_seeds: of each environment's first episodes, in place of derived ones.
    """

    first: int = 0
    episodes: tuple[int, ...] = ()
    generation: int = 0
    given_seeds: tuple[tuple[int, ...], ...] = ()

    def part(self, plan: Plan, own: range) -> Plan:
        """Return the plan of some of the environments.

        Args:
            plan: which seed and limit are taken from.
            own: their indices within the collector.
        """
        return replace(
            plan,
            environments=range(self.first + own.start, self.first + own.stop),
            episodes=self.episodes[own.start : own.stop],
            generation=self.generation,
            given_seeds=self.given_seeds[own.start : own.stop],
        )


class Collect(Protocol):
    """Fills one slot."""

    def __call__(self, *, random: bool) -> Filled:
        """Collect, at random or with the policy."""
        ...


@final
@dataclass(frozen=True)
class Driven:
    """What drives a collector.

    Attributes:
        layout: of its slots.
        sizes: environments of each worker.
        place: numbers environments and episodes, before anything is collected.
        collect: fills one slot.
        preempt: asks, from any thread, for what there is; the next ``collect``
            forgets it.
        steps: frames so far, from any thread.
        running: number of each environment's running episode.
        publish: writes weights, for all workers or some.
        weights: every worker's weights by name; empty without any.
        begin_episodes: begins new ones, in all workers or some.
        reseed: derives everything random from a seed.
        states: what ``load`` needs.
        load: goes on from states; returns the number of each running episode.
        attribute: of every worker's ``"env"`` or ``"policy"``.
        explain: which path each worker's policy takes.
        figures: counters.
    """

    layout: Layout
    sizes: Sequence[int]
    place: Callable[[Place], None]
    collect: Collect
    preempt: Callable[[], None]
    steps: Callable[[], int]
    running: Callable[[], tuple[int, ...]]
    publish: Callable[[Sequence[torch.Tensor], Sequence[int] | None], None]
    weights: Callable[[], Sequence[Mapping[str, torch.Tensor]]]
    begin_episodes: Callable[[Sequence[bool] | None], None]
    reseed: Callable[[int], None]
    states: Callable[[], list[Any]]
    load: Callable[[list[Any]], tuple[int, ...]]
    attribute: Callable[[str, str], list[Any]]
    explain: Callable[[], list[str]]
    figures: Callable[[], dict[str, Any]]
