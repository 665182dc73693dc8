"""The interface through which other code runs a collector, batch by batch.

The actors of ``marl_collect.distributed`` use it in place of the collector's iterator.
The caller decides what happens to a filled slot.
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
class Placement:
    """The range of environments that one of several collectors runs.

    Attributes:
        first: index of its first environment.
        episodes: number of the last episode that each environment began in a
            collector that this one replaces; () if it replaces none.
        generation: how often the collector was restarted.
        given_seeds: seeds of each environment's first episodes; () derives them.
    """

    first: int = 0
    episodes: tuple[int, ...] = ()
    generation: int = 0
    given_seeds: tuple[tuple[int, ...], ...] = ()

    def part(self, plan: Plan, own: range) -> Plan:
        """Return the plan for some of the environments.

        Args:
            plan: provides the seed and the limit.
            own: their indices within the collector.
        """
        return replace(
            plan,
            environments=range(self.first + own.start, self.first + own.stop),
            episodes=self.episodes[own.start : own.stop],
            generation=self.generation,
            given_seeds=self.given_seeds[own.start : own.stop],
        )


class FillSlot(Protocol):
    """Fills one slot."""

    def __call__(self, *, random: bool) -> Filled:
        """Collect, at random or with the policy."""
        ...


@final
@dataclass(frozen=True)
class RemoteCollector:
    """The operations of a collector that runs for another process.

    Attributes:
        layout: of its slots.
        sizes: environments of each worker.
        place: numbers environments and episodes; called before the first ``collect``.
        collect: fills one slot.
        preempt: ends the running ``collect`` early, from any thread; the next
            ``collect`` is not affected.
        steps: returns the frames so far, from any thread.
        running: returns the number of each environment's running episode.
        publish: writes weights, for all workers or some.
        weights: returns every worker's weights by name; empty if there are none.
        begin_episodes: begins new episodes, in all workers or some.
        reseed: derives all random numbers from a seed.
        states: returns the states that ``load`` takes.
        load: resumes from states; returns the number of each running episode.
        attribute: returns an attribute of every worker's ``"env"`` or ``"policy"``.
        explain: says which path each worker's policy takes.
        metrics: returns the counters.
    """

    layout: Layout
    sizes: Sequence[int]
    place: Callable[[Placement], None]
    collect: FillSlot
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
    metrics: Callable[[], dict[str, Any]]
