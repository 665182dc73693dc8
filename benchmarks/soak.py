"""Soak test: workers are killed, suspended, hang and raise; data must stay correct.

    python benchmarks/soak.py --minutes 5

Rounds of every kind of collector follow each other until the time is over. Each batch
is checked frame by frame (``_soak_checks.py``). After each round, no process, file or
memory may be left. Exits with code 1 if a check failed.
"""

import argparse
import random
import sys
import time
from collections import Counter
from typing import Any

from _soak_chaos import Chaos, make_factory
from _soak_checks import Checks, Leaks, ViolationError, constant_policy
from workloads.counting import CountingError

from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.errors import worker_error_of

WORKERS, ENVIRONMENTS, FRAMES = 3, 2, 20
ROUND_SECONDS = 12.0

ROUNDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("sync, restart", MultiSyncCollector, {"on_worker_failure": "restart"}),
    ("async, restart", MultiAsyncCollector, {"on_worker_failure": "restart"}),
    (
        "sync, prefetch, restart",
        MultiSyncCollector,
        {"on_worker_failure": "restart", "prefetch": True},
    ),
    ("sync, raise", MultiSyncCollector, {}),
    ("async, raise", MultiAsyncCollector, {}),
]


def play(
    kind: Any, options: dict[str, Any], seed: int, seconds: float
) -> tuple[Counter[str], str]:
    """Collect while workers fail; return counts and how the round ended."""
    rng = random.Random(seed)
    sync = kind is MultiSyncCollector
    batch = FRAMES * ENVIRONMENTS * (WORKERS if sync else 1)
    collector = kind(
        make_factory(seed, quiet=3 * FRAMES),
        constant_policy(),
        num_workers=WORKERS,
        envs_per_worker=ENVIRONMENTS,
        frames_per_batch=batch,
        track_policy_version=True,
        seed=seed,
        timeout=5.0,
        **options,
    )
    checks = Checks(collector, seed, sync=sync, prefetch=bool(options.get("prefetch")))
    restart = options.get("on_worker_failure") == "restart"
    chaos = Chaos(collector, rng)
    end, outcome = time.monotonic() + seconds, "time is over"
    try:
        while time.monotonic() < end:
            try:
                before = collector.worker_pids
                chaos.delivered(checks.batch(collector.next()), before)
                for _ in range(rng.choice([0, 0, 1, 3])):
                    checks.publish()
            except ViolationError:
                raise
            except Exception as error:  # noqa: BLE001 - expected_error examines each
                outcome = expected_error(error, restart=restart)
                break
    finally:
        chaos.stop()
        pids = collector.worker_pids
        collector.shutdown()
    checks.end(pids)
    counts = checks.counts + chaos.counts
    counts["restarts"] = collector.stats()["restarts"]
    return counts, outcome


def expected_error(error: Exception, *, restart: bool) -> str:
    """Return how a round without restarts ended.

    Raises:
        ViolationError: if the error was not expected.
    """
    cause = worker_error_of(error)
    if restart or cause is None:
        raise ViolationError(f"unexpected {type(error).__name__}: {error}") from error
    is_counting_error = isinstance(error, CountingError)
    if is_counting_error != ("CountingError" in cause.detail):
        raise ViolationError(f"wrong type: {type(error).__name__} for {cause}")
    return f"worker {cause.worker} {cause.problem}"


def main() -> int:
    """Run rounds and print their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    leaks, violations, number = Leaks(), 0, 0
    totals: dict[str, Counter[str]] = {name: Counter() for name, *_ in ROUNDS}
    while number == 0 or time.monotonic() < end:
        name, kind, options = ROUNDS[number % len(ROUNDS)]
        seconds = min(ROUND_SECONDS, max(3.0, end - time.monotonic()))
        try:
            counts, outcome = play(kind, options, arguments.seed + number, seconds)
            totals[name] += counts
            leaks.look(warm=number >= len(ROUNDS))
        except ViolationError as violation:
            violations += 1
            outcome = f"VIOLATED: {violation}"
        totals[name]["rounds"] += 1
        print(f"round {number:3d}  {name:24}  {outcome.splitlines()[0]}", flush=True)
        number += 1
    violations += report(totals, leaks)
    return 1 if violations else 0


def report(totals: dict[str, Counter[str]], leaks: Leaks) -> int:
    """Print the table and return the number of leaks."""
    columns = ["rounds", "batches", "frames", "episodes", "published", "restarts"]
    columns += ["kills", "stops"]
    print("\n" + " " * 24 + "".join(f"{column:>11}" for column in columns))
    for name, counts in totals.items():
        print(f"{name:24}" + "".join(f"{counts[column]:11,}" for column in columns))
    leak_messages = leaks.judge()
    print(f"\n{leaks.describe()}")
    for leak in leak_messages:
        print(f"VIOLATED: {leak}")
    return len(leak_messages)


if __name__ == "__main__":
    sys.exit(main())
