"""What goes wrong in a soak: from inside the environments, and from outside."""

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

from marl_collect.testing.counting import CountingEnv, CountingError, Fault

INSIDE_SECONDS = 8.0  # Mean time of an environment until it does harm.
OUTSIDE_SECONDS = 0.7  # Mean time between two signals from outside.
LONGEST_STOP = 0.5


def make_factory(seed: int, quiet: int) -> Callable[[], CountingEnv]:
    """Return a factory of environments that do harm sooner or later.

    Args:
        seed: of what they do and when; the process id counts, too.
        quiet: steps that go well first, so that a new worker delivers something: one
            that fails at once is not started again.
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
    """A thread that stops and kills the workers of a collector.

    Attributes:
        counts: what it has done.
    """

    def __init__(self, collector: Any, rng: random.Random) -> None:
        """Begin."""
        self.counts: Counter[str] = Counter()
        self._collector = collector
        self._rng = random.Random(rng.random())
        self._delivered: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def delivered(self, workers: Iterable[int], before: Sequence[int]) -> None:
        """Note that these workers may be killed, unless they were just replaced.

        Args:
            workers: those that delivered a batch.
            before: every worker's process when the batch was asked for.
        """
        pids = self._collector.worker_pids
        for worker in workers:
            if pids[worker] == before[worker]:
                self._delivered[worker] = pids[worker]
            else:
                self._delivered.pop(worker, None)

    def stop(self) -> None:
        """Leave the workers alone from now on."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        rng = self._rng
        while not self._over.wait(rng.expovariate(1 / OUTSIDE_SECONDS)):
            pids = list(self._delivered.values())
            if not pids:
                continue
            pid = rng.choice(pids)
            # A worker may have ended by now, and its number be somebody else's.
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
