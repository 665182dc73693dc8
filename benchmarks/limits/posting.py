"""What the kernel takes for a step of N processes: wake-ups, and nothing around them.

The processes sleep on the semaphores that ParallelEnv uses, one each; whoever is the
last to be done wakes the process that asked. No flag of a failure, no deadline but one.
"""

import mmap
import multiprocessing as mp  # noqa: TID251 - without a framework is the point
import os
from collections.abc import Callable
from typing import final

from marl_collect.parallel_env.semaphore import NBYTES, Semaphore
from marl_collect.processes.status_board import fence
from marl_collect.processes.survival import die_with_parent

_SECONDS = 60.0
_HOUR = 3600.0

Step = Callable[[], None]


@final
class Posting:
    """N processes that take a step when they are asked to, and end with who asks."""

    def __init__(
        self,
        count: int,
        build: Callable[[int], Step],
        *,
        spin: float = 0.0,
    ) -> None:
        """Fork them.

        Args:
            count: how many.
            build: called in each with its number; returns its step.
            spin: seconds that all look before going to sleep.
        """
        memory = mmap.mmap(-1, (count + 1) * NBYTES + 16 * count)
        self._go = [
            Semaphore(memory, index * NBYTES, fresh=True, spin=spin)
            for index in range(count)
        ]
        self._done = Semaphore(memory, count * NBYTES, fresh=True, spin=spin)
        turns = memoryview(memory)[(count + 1) * NBYTES :].cast("q")
        self._requests, self._taken = turns[:count], turns[count:]
        context = mp.get_context("fork")
        for index, go in enumerate(self._go):
            common = (os.getpid(), index, build, go, self._done)
            flags = (self._requests, self._taken)
            context.Process(target=_serve, args=(*common, *flags), daemon=True).start()

    def step(self) -> None:
        """Have all of them take a step, and wait for the last one."""
        requests = self._requests
        for index in range(len(requests)):
            requests[index] += 1
        for go in self._go:
            go.post()
        while True:
            if not self._done.wait(_SECONDS):
                raise TimeoutError("A process that takes steps did not.")
            # Two that are the last at once both say so: a wake-up may be an old one.
            if self._taken.tobytes() == requests.tobytes():
                return


def _serve(
    parent: int,
    index: int,
    build: Callable[[int], Step],
    go: Semaphore,
    all_done: Semaphore,
    requests: "memoryview[int]",
    replies: "memoryview[int]",
) -> None:
    die_with_parent(parent)
    step = build(index)
    while go.wait(_HOUR):
        step()
        replies[index] += 1
        fence()
        if replies.tobytes() == requests.tobytes():
            all_done.post()
