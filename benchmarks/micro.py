"""Micro-benchmarks: alternatives within one process, measured in turn.

    python benchmarks/micro.py                              # names of the benchmarks
    python benchmarks/micro.py policy_step --list           # its rows
    python benchmarks/micro.py policy_step --rounds 5
    python benchmarks/micro.py models --only forward "3 agents"
    python benchmarks/micro.py datasets --rounds 1          # takes minutes

The output is a Markdown table. Times are medians over rounds, of processor time in one
thread unless the calls wait for disks or processes. The last column is the time divided
by that of the row's first alternative, within a round, with its 95 % interval. Ratios
carry over to other machines, absolute numbers do not. Rows whose library is missing say
so.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

# No window of a game opens, and its sounds are not played.
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("SDL_AUDIODRIVER", "dummy")

import torch
from cases.case import Case
from harness.estimates import Estimate, number
from harness.turns import measure

TABLE = (
    "policy_step",
    "torchrl_policies",
    "models",
    "learners",
    "convolutions",
    "assignment",
    "families",
    "worlds",
    "prefetch",
    "groups",
    "datasets",
)
"""Modules of ``cases``."""


def find_cases(name: str, words: Sequence[str] = ()) -> list[Case]:
    """Return the rows of a benchmark whose names contain all words."""
    cases: list[Case] = importlib.import_module(f"cases.{name}").cases()
    return [case for case in cases if all(word in case.name for word in words)]


def rows(case: Case, rounds: int, seconds: float) -> list[str]:
    """Measure a case and return the lines of the table."""
    with ExitStack() as stack:
        try:
            alternatives = case.build(stack)
        except ImportError as error:
            return [f"| {case.name} | not installed: {error} | | | |"]
        times = measure(alternatives, rounds, seconds=seconds, clock=case.clock)
        lines: list[str] = []
        for name, case_times in times.items():
            nbytes = alternatives[name].nbytes
            size = "" if nbytes is None else number(nbytes() / 1e6)
            ratio = str(Estimate.of_ratios(case_times, next(iter(times.values()))))
            lines.append(
                f"| {case.name} | {name} | {case.show(case_times)} | {size} | "
                f"{ratio if lines else ''} |"
            )
    return lines


def main() -> None:
    """Print the table of a benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=TABLE)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="rows with all words"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a window")
    parser.add_argument("--list", action="store_true", help="names of the rows")
    arguments = parser.parse_args()
    # Exit hooks delete files; a signal alone, such as that of `timeout`, skips them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if arguments.name is None:
        print("\n".join(TABLE))
        return
    cases = find_cases(arguments.name, arguments.only)
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| row | alternative | time | MB | time / first |")
    print("|---|---|---:|---:|---:|")
    for case in cases:
        print(*rows(case, arguments.rounds, arguments.seconds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
