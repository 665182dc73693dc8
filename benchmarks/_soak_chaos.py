"""Failures of the soak test: raised in environments, and sent as signals."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

from workloads.counting import CountingEnv, CountingError, Fault

INSIDE_SECONDS = 8.0  # Mean time until an environment fails.
OUTSIDE_SECONDS = 0.7  # Mean time between two signals.
LONGEST_STOP = 0.5


def make_factory(seed: int, quiet: int) -> Callable[[], CountingEnv]:
    """Return a factory of environments that fail after a random time.

    Args:
        seed: of the failures, together with the process id.
        quiet: number of steps before failures begin. A worker that fails before it
            delivers a batch is not restarted.
    """

    def make() -> CountingEnv:
        rng = random.Random(f"{seed} {os.getpid()}")
        due = time.monotonic() + rng.expovariate(1 / INSIDE_SECONDS)

        def harm() -> None:
            if time.monotonic() < due:
                return
            kind = rng.choices(["kill", "raise", "exit", "hang"], [4, 4, 2, 1])[0]
            if kind == "raise":
                raise CountingError("chaos")
            if kind == "kill":
                os.kill(os.getpid(), rng.choice([signal.SIGKILL, signal.SIGSEGV]))
            if kind == "hang":
                threading.Event().wait()
            os._exit(3)

        fault = Fault(harm, "step", at=quiet, repeat=True)
        return CountingEnv(deaths=False, fault=fault)

    return make


@final
class Chaos:
    """A thread that suspends and kills the workers of a collector.

    Attributes:
        counts: number of signals by kind.
    """

    def __init__(self, collector: Any, rng: random.Random) -> None:
        """Start the thread."""
        self.counts: Counter[str] = Counter()
        self._collector = collector
        self._rng = random.Random(rng.random())
        self._delivered: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def delivered(self, workers: Iterable[int], before: Sequence[int]) -> None:
        """Allow these workers to be killed, unless they were just replaced.

        Args:
            workers: workers that delivered a batch.
            before: process id of every worker when the batch was requested.
        """
        pids = self._collector.worker_pids
        for worker in workers:
            if pids[worker] == before[worker]:
                self._delivered[worker] = pids[worker]
            else:
                self._delivered.pop(worker, None)

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        rng = self._rng
        while not self._over.wait(rng.expovariate(1 / OUTSIDE_SECONDS)):
            pids = list(self._delivered.values())
            if not pids:
                continue
            pid = rng.choice(pids)
            # The worker may have ended, and its process id may have been reused.
            with contextlib.suppress(OSError):
                if not Path(f"/proc/{pid}/comm").read_text().startswith("marl-worker"):
                    continue
                if rng.random() < 0.3:
                    os.kill(pid, signal.SIGKILL)
                    self.counts["kills"] += 1
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self.counts["stops"] += 1
                    self._over.wait(rng.uniform(0.05, LONGEST_STOP))
                    os.kill(pid, signal.SIGCONT)
