"""Which workers of an async collector start a batch, and when."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from workloads.counting import CountingEnv

from marl_collect.buffers.layout import Layout
from marl_collect.collectors import CollectorOptions, messages
from marl_collect.collectors.teams import Teams
from marl_collect.core.description import Field
from marl_collect.rollout.episodes import EndedEpisodes
from marl_collect.rollout.loop import Collected

NONE = np.zeros(0, np.int64)


class ScriptedWorkers:
    """Workers that are done in the order of ``ready``; ``started`` lists commands."""

    def __init__(self, count: int, ready: Iterable[int]) -> None:
        self.sizes = [1] * count
        self.weights = self.description = self.statistics = None
        self.started: list[int] = []
        self._ready = list(ready)

    def __len__(self) -> int:
        return len(self.sizes)

    def layout(self, environments: int, frames: int) -> Layout:
        return Layout.plan(
            {("done",): Field((1,), np.dtype(bool))}, (environments, frames)
        )

    def attach(self, *_: Any) -> None:
        pass

    def collect(self, workers: Sequence[int], command: messages.Collect) -> None:
        self.started.extend(workers)

    def wait(self, indices: Iterable[int]) -> tuple[int, Collected]:
        waiting = list(indices)
        index = next(k for k in self._ready if k in waiting)
        self._ready.remove(index)
        return index, Collected(
            4, EndedEpisodes(NONE, NONE, NONE, {}, {}), (), 0.0, 0.0, (), ""
        )

    def close(self, timeout: float) -> None:
        pass


def started(
    workers: ScriptedWorkers, limit: int | None, batches: int
) -> list[list[int]]:
    """The workers that start in each of ``batches`` calls of ``collect``."""
    options = CollectorOptions(CountingEnv, frames_per_batch=4, max_staleness=limit)
    frames = [4] * len(workers)
    fake: Any = workers
    teams = Teams(fake, options, frames, team=1)
    calls = []
    for batch in range(batches):
        before = len(workers.started)
        teams.fill(random=False, delivered=4 * batch)
        calls.append(workers.started[before:])
    teams.close(0.0)
    return calls


def test_idle_workers_take_turns() -> None:
    # The limit leaves one or two workers idle, and the longest idle one is next.
    workers = ScriptedWorkers(3, ready=[1, 0, 2, 0])
    assert started(workers, 1, batches=4) == [[0, 1], [2], [0], [1]]


def test_without_a_limit_a_worker_starts_again_at_once() -> None:
    workers = ScriptedWorkers(3, ready=[1, 1, 0])
    assert started(workers, None, batches=3) == [[0, 1, 2, 1], [1], [0]]


@pytest.mark.parametrize(
    ("limit", "ready", "expected"),
    [
        (0, [0, 1, 2], [[0], [1], [2]]),  # One at a time, begun when it is asked for.
        (1, [0, 1, 2], [[0, 1], [2], [0]]),
        # Two were overtaken once, so the next starts when one of them is left.
        (2, [0, 1, 2], [[0, 1, 2], [], [0, 1]]),
        (2, [1, 2, 0], [[0, 1, 2], [], [0, 1]]),
    ],
)
def test_no_batch_can_become_staler_than_the_limit(
    limit: int, ready: list[int], expected: list[list[int]]
) -> None:
    assert started(ScriptedWorkers(3, ready), limit, batches=3) == expected


def test_a_batch_that_is_begun_before_a_delivery_is_stale_from_the_start() -> None:
    """The user may update the weights after the delivery, which comes first."""
    workers = ScriptedWorkers(2, ready=[0, 1, 0])
    assert started(workers, 2, batches=3) == [[0, 1, 0], [], [1, 0]]
