"""Waits that several tests of collectors use."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.internals import pool_of
from support.processes import wait_until
from workloads.counting import CountingEnv, Fault

from marl_collect.processes.status_board import MESSAGES_READ, PHASE, Phase


def wait_until_idle(collector: Any, frames: int = 0) -> None:
    """Wait until workers have collected and sent what was asked of them, or more."""
    pool = pool_of(collector)
    steps = -1

    def idle() -> bool:
        nonlocal steps
        before, steps = steps, collector.steps_so_far()
        waiting = [
            # A worker waits for a message after it has sent its batch.
            line.cells[PHASE] == Phase.IDLE and line.cells[MESSAGES_READ] >= handle.sent
            for line, handle in zip(pool.status_board.lines, pool._handles, strict=True)
        ]
        return all(waiting) and steps == before >= collector.frames + frames

    wait_until(idle)


def collect_from_all(collector: Any, environments: int) -> None:
    """Collect until a batch of every environment was delivered, however slow one is.

    Of an async collector the batches that follow were begun after this call.
    """
    waited = set(range(environments))
    while waited:
        ids = collector.next()["collector", "traj_ids"][:, 0]
        waited -= set((ids >> 32).tolist())


def slow_until_preempted(folder: Path) -> Callable[[], CountingEnv]:
    """Return a factory whose steps from the sixth on wait for a preemption each.

    So its worker is the slow one in every batch; see ``release_when_preempted``.
    """

    def make() -> CountingEnv:
        held = 0

        def wait() -> None:
            nonlocal held
            held += 1
            files = folder / f"{held}", folder / "closing"
            while not any(file.exists() for file in files):
                threading.Event().wait(0.005)

        return CountingEnv(fault=Fault(wait, at=5, repeat=True))

    return make


def release_when_preempted(collector: Any, worker: int, folder: Path) -> None:
    """Let a worker of ``slow_until_preempted`` take a step whenever it is preempted.

    It is released when the pool closes, which would grant it seconds for its step.
    """
    pool = pool_of(collector)
    preempt, close = pool.preempt, pool.close
    count = 0

    def preempt_and_release(index: int, *, preempted: bool) -> None:
        nonlocal count
        preempt(index, preempted=preempted)
        if index == worker and preempted:
            count += 1
            (folder / f"{count}").touch()

    def release_and_close(timeout: float) -> Any:
        (folder / "closing").touch()
        return close(timeout)

    pool.preempt, pool.close = preempt_and_release, release_and_close
