"""A comparison and a wait that several tests of collectors use."""

from typing import Any

import torch
from support.processes import wait_until
from tensordict import TensorDictBase

from marl_collect.processes.status_board import MESSAGES_READ, PHASE, Phase


def same(td: TensorDictBase, other_td: TensorDictBase, tolerance: float = 1e-5) -> None:
    """Check that two batches have the same keys, and nearly the same values."""
    assert set(td.keys(True, True)) == set(other_td.keys(True, True))
    for key in td.keys(True, True):
        torch.testing.assert_close(
            td[key], other_td[key], rtol=tolerance, atol=tolerance
        )


def wait_until_idle(collector: Any, frames: int = 0) -> None:
    """Wait until workers have collected and sent what was asked of them.

    Args:
        collector: a collector with workers.
        frames: how many they collect in advance.
    """
    pool = collector._backend._workers._pool
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
