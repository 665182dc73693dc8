"""Async batches are from one worker; none is lost, copied or staler than the limit."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collector_tools import wait_until_idle
from support.clocks import waits
from tensordict import TensorDictBase
from tests_policies import level_policy
from workloads.counting import CountingEnv, Fault

from marl_collect.buffers.layout import Layout
from marl_collect.collectors import (
    CollectorOptions,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    messages,
)
from marl_collect.collectors.teams import Teams
from marl_collect.core.description import Field
from marl_collect.rollout.episodes import EndedEpisodes
from marl_collect.rollout.loop import Collected


def test_random_actions_end_after_the_requested_frames() -> None:
    with MultiAsyncCollector(
        CountingEnv, level_policy(), frames_per_batch=20, init_random_frames=20
    ) as collector:
        assert (collector.next()["prey", "action"] != 0.0).any()
        assert (collector.next()["prey", "action"] == 0.0).all()


def environment(row: TensorDictBase) -> int:
    return int(row["collector", "traj_ids"][0]) >> 32


@pytest.mark.torchrl_defect("D11")
def test_a_slow_consumer_loses_no_batch_and_starves_no_worker() -> None:
    collector = MultiAsyncCollector(
        [CountingEnv] * 3, frames_per_batch=10, total_frames=120, seed=0
    )
    rows = defaultdict(list)
    for batch in collector:
        for row in batch.clone().unbind(0):
            rows[environment(row)].append(row)
        if collector.frames < 120:
            wait_until_idle(collector, 3 * 10)  # All workers have a batch ready.
    assert {index: len(batches) for index, batches in rows.items()} == {
        0: 4,
        1: 4,
        2: 4,
    }
    for row_batches in rows.values():
        frames = torch.cat(row_batches)
        following = frames["next", "hunter", "observation"][:-1]
        inside = ~frames["next", "done"][:-1, 0]
        assert torch.equal(
            frames["hunter", "observation"][1:][inside], following[inside]
        ), "a frame is missing between two batches"


def test_fast_workers_do_not_wait_for_slow_ones(tmp_path: Path) -> None:
    """The slow one waits in its first batch for five batches of the fast one."""
    started, finish = tmp_path / "started", tmp_path / "finish"

    def slow() -> CountingEnv:
        return CountingEnv(fault=Fault(waits(started, finish), at=3))

    turns: Counter[int] = Counter()
    with MultiAsyncCollector([slow, CountingEnv], frames_per_batch=10) as collector:
        while turns[0] < 1:
            turns[environment(collector.next()[0])] += 1
            if turns[1] == 5:
                finish.touch()
    assert turns[1] >= 5


@pytest.mark.torchrl_defect("D10")
def test_frames_per_worker_are_honoured() -> None:
    collector = MultiAsyncCollector(
        [CountingEnv] * 2, frames_per_batch=[5, 15], total_frames=100
    )
    with pytest.raises(TypeError, match="has no length"):
        len(collector)
    for batch in collector:
        assert batch.shape == (1, 5 if environment(batch[0]) == 0 else 15)


def test_dispatch_by_sync() -> None:
    with MultiCollector(CountingEnv, sync=True, frames_per_batch=8) as sync:
        assert type(sync) is MultiSyncCollector
    with MultiCollector(CountingEnv, sync=False, frames_per_batch=8) as other:
        assert type(other) is MultiAsyncCollector


def test_the_end_of_a_loop_does_not_wait_for_a_slow_worker(tmp_path: Path) -> None:
    # Its batch takes 5 s, less than a shutdown grants to workers.
    finished, steps = tmp_path / "finished", 1000

    def slow() -> CountingEnv:
        numbers = count(1)

        def wait() -> None:
            threading.Event().wait(0.005)
            if next(numbers) == steps:
                finished.touch()

        return CountingEnv(fault=Fault(wait, repeat=True))

    collector = MultiAsyncCollector(
        [CountingEnv, slow], frames_per_batch=[4, steps], total_frames=40
    )
    assert [batch.numel() for batch in collector] == [4] * 10
    assert not finished.exists()


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


@pytest.mark.parametrize(
    ("limit", "ready", "expected"),
    [
        (0, [0, 1, 2], [[0], [1], [2]]),  # One at a time, begun when it is asked for.
        (1, [0, 1, 2], [[0, 1], [2], [0]]),
        # Two were overtaken once, so the next starts when one of them is left.
        (2, [0, 1, 2], [[0, 1, 2], [], [0, 1]]),
        (2, [1, 2, 0], [[0, 1, 2], [], [0, 1]]),
        # The limit leaves one or two workers idle, and the longest idle one is next.
        (1, [1, 0, 2, 0], [[0, 1], [2], [0], [1]]),
        # Without a limit a worker starts again at once.
        (None, [1, 1, 0], [[0, 1, 2, 1], [1], [0]]),
    ],
)
def test_no_batch_can_become_staler_than_the_limit(
    limit: int | None, ready: list[int], expected: list[list[int]]
) -> None:
    workers = ScriptedWorkers(3, ready)
    assert started(workers, limit, len(expected)) == expected


def test_a_batch_that_is_begun_before_a_delivery_is_stale_from_the_start() -> None:
    """The user may update the weights after the delivery, which comes first."""
    workers = ScriptedWorkers(2, ready=[0, 1, 0])
    assert started(workers, 2, batches=3) == [[0, 1, 0], [], [1, 0]]
