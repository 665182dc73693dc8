"""What the kernel takes for a step of N processes that do nothing: wake-ups alone.

The processes sleep on the semaphores that ParallelEnv uses, one each; whoever is the
last to wake wakes the process that asked. No environment, no flag of a failure, no
deadline but one.
"""

import mmap
import multiprocessing as mp  # noqa: TID251 - without a framework is the point
import os
from typing import Any, final

from marl_collect.parallel_env.semaphore import NBYTES, Semaphore, fence, semaphore
from marl_collect.processes.survival import die_with_parent

_SECONDS = 60.0
_HOUR = 3600.0


@final
class Posting:
    """N processes that wake when they are asked to, say so, and end with who asks."""

    def __init__(self, count: int) -> None:
        """Fork them."""
        memory = mmap.mmap(-1, (count + 1) * NBYTES + 8 * count)
        self._go = [semaphore(memory, p * NBYTES, fresh=True) for p in range(count)]
        self._done = semaphore(memory, count * NBYTES, fresh=True)
        self._turns = memoryview(memory)[(count + 1) * NBYTES :].cast("q")
        self._turn = 0
        context = mp.get_context("fork")
        for p in range(count):
            arguments = (os.getpid(), p, self._go[p], self._done, self._turns)
            context.Process(target=_wake, args=arguments, daemon=True).start()

    def step(self) -> None:
        """Wake all of them, and wait until the last one is awake."""
        self._turn += 1
        for go in self._go:
            go.post()
        # Two that are the last at once both say so: a wake-up may be an old one.
        while any(turn != self._turn for turn in self._turns):
            if not self._done.sleep(_SECONDS):
                raise TimeoutError("A process that only wakes did not.")


def _wake(parent: int, own: int, go: Semaphore, done: Semaphore, turns: Any) -> None:
    die_with_parent(parent)
    while go.sleep(_HOUR):
        turns[own] += 1
        fence()
        if all(turn == turns[own] for turn in turns):
            done.post()
