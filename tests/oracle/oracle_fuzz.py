"""Compare random combinations for some minutes: ``make fuzz MINUTES=30``.

Every process begins with a seed of its own, which it prints. What differs is shrunk,
and written as a script to ``build/fuzz``; ``--seed`` repeats the draws of one process.
"""

import argparse
import hashlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from oracle_cases import Case, check
from oracle_strategies import cases

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "fuzz"
COLLECTORS = (
    *["Collector"] * 6,
    *["sync"] * 3,
    "async",
    "parallel",
    "serial",
    "halves",
)
LIMIT = 120
"""Seconds after which one combination counts as hung."""
SHRINKING = 60
"""Seconds spent on minimising a mismatch."""
CHUNK = 40
EVERY = 60
"""Seconds between two progress lines of a process."""


def script(case: Case) -> str:
    """Return a program that collects and compares one case."""
    return f'''"""Found by `make fuzz`. Runs with the Python that the tests run with."""

import os
import sys
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parent)!r})
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:1] + [
    path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
])

from oracle_cases import Case, check
from oracle_worlds import Group, World

# The policy is the function of this name in tests/oracle/oracle_policies.py.
case = {case!r}

if __name__ == "__main__":
    print(check(case), "frames are equal")
'''


class Fuzz:
    """One process's combinations."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.compared = self.frames = self.failures = 0
        self.known: set[str] = set()
        self.failing: tuple[Case, str, str] | None = None
        self.shrink_until = 0.0

    def run(self, until: float) -> None:
        """Compare until then."""
        while time.monotonic() < until:
            self.number += 1
            self.chunk(self.number)
            self.show_counts()

    def show_counts(self) -> None:
        """Print the counts for the parent process."""
        counts = self.compared, self.frames, self.failures, len(self.known)
        print("COUNTS", *counts, flush=True)

    def chunk(self, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=CHUNK,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(COLLECTORS))
        def compare(case: Case) -> None:
            self.one(case)

        self.failing = None
        try:
            compare()
        except BaseException as error:
            if self.failing is None:
                raise
            self.report(error)

    def one(self, case: Case) -> None:
        """Compare one case; remember it if it differs."""
        if self.failing is not None and time.monotonic() > self.shrink_until:
            return  # Hypothesis may report it as flaky; the case is stored here.
        signal.alarm(LIMIT)
        try:
            self.frames += check(case)
        except Exception as error:
            kind = signature(error)
            if self.failing is None:
                self.compared += 1
                if kind in self.known:
                    self.failures += 1
                    return
                self.shrink_until = time.monotonic() + SHRINKING
            elif kind != self.failing[1]:
                return  # Shrinking follows one mismatch only.
            self.failing = case, kind, traceback.format_exc()
            raise
        finally:
            signal.alarm(0)
        if self.failing is None:
            self.compared += 1
            self.show_counts()

    def report(self, error: BaseException) -> None:
        """Write the smallest mismatch as a script."""
        del error
        assert self.failing is not None
        case, kind, text = self.failing
        self.known.add(kind)
        self.failures += 1
        FOLDER.mkdir(parents=True, exist_ok=True)
        program = script(case)
        name = hashlib.sha256(kind.encode()).hexdigest()[:8]
        path = FOLDER / f"mismatch-{name}.py"
        path.write_text(program, encoding="utf-8")
        print(f"\nMISMATCH, written to {path}:\n{text}\n{program}", flush=True)


def signature(error: BaseException) -> str:
    """Return a key that failures with the same cause share."""
    first = str(error).split("\n")[0]
    return type(error).__name__ + re.sub(r"[0-9]+", "#", first)[:160]


def hung(*_: Any) -> None:
    raise TimeoutError(f"not done after {LIMIT} s")


def work(number: int, minutes: float) -> int:
    """Fuzz in this process."""
    signal.signal(signal.SIGALRM, hung)
    print(f"seed {number}", flush=True)
    fuzz = Fuzz(number)
    fuzz.run(time.monotonic() + 60 * minutes)
    return 1 if fuzz.failures else 0


def read(job: "subprocess.Popen[str]") -> list[int]:
    """Show what a process prints; return its last counts."""
    counts = [0, 0, 0, 0]
    printed_at = time.monotonic()
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("COUNTS"):
            counts = [int(number) for number in line.split()[1:]]
            if time.monotonic() > printed_at + EVERY:
                printed_at = time.monotonic()
                print(f"{counts[0]} combinations, {counts[1]} frames", flush=True)
        else:
            print(line, end="", flush=True)
    return counts


def main() -> int:
    """Fuzz in several processes, and add up their counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="of the only process")
    given_ = parser.parse_args()
    if given_.seed is not None:
        return work(given_.seed, given_.minutes)
    command = [sys.executable, __file__, "--minutes", str(given_.minutes), "--seed"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    begin = time.monotonic()
    jobs = [
        subprocess.Popen(
            [*command, str(secrets.randbits(40))],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(given_.jobs)
    ]
    with ThreadPoolExecutor(len(jobs)) as readers:
        counts = list(readers.map(read, jobs))
    totals = [sum(column) for column in zip(*counts, strict=True)]
    broken = sum(job.wait() not in (0, 1) for job in jobs)
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{totals[0]} combinations with {totals[1]} frames compared in {minutes:.1f} "
        f"minutes: {totals[2]} mismatched, of {totals[3]} kinds."
    )
    if broken:
        print(f"{broken} of {given_.jobs} processes ended early.")
    return 1 if totals[2] or broken else 0


if __name__ == "__main__":
    sys.exit(main())
