"""Frames per second of collection: bare loops, TorchRL's collector, and ours.

Side by side in one run: every system lives in a process of its own, and they are
measured in turn, forwards and backwards, so that whatever slows the machine slows all.

* bare: the stock ``parallel_env`` in as many processes as there are workers, at once,
  with drawn actions or the same network; nothing is stored. The limit.
* torchrl: ``MultiSyncCollector``, in the best of several configurations, which are
  measured first.
* ours: ``MultiSyncCollector`` with defaults.

Both collectors get the same network with the same weights, the same number of frames
per batch, and every byte of every batch is read. Ratios are taken within a repetition;
median and 95 % interval are over repetitions. Absolute numbers belong to the machine.

    python benchmarks/throughput.py               # minutes
    python benchmarks/throughput.py --quick       # does it work?
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from _measure import Estimate, machine
from _systems import GROUPS, System
from rich.console import Console
from rich.table import Table

TORCHRL_GRID: list[dict[str, Any]] = [
    {"cat_results": "stack", "num_threads": 1, "trust_policy": True},
    {"cat_results": "stack", "num_threads": 1, "trust_policy": False},
    {"cat_results": -1, "num_threads": 1, "trust_policy": True},
    {
        "cat_results": "stack",
        "num_threads": 1,
        "trust_policy": True,
        "use_buffers": False,
    },
]
SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
}


class Running:
    """A system's process, or several of the same that are measured at once."""

    def __init__(self, system: System, copies: int = 1) -> None:
        self.system = system
        command = [sys.executable, str(Path(__file__).with_name("_systems.py"))]
        self._processes = [
            subprocess.Popen(
                [*command, system.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=os.environ | SURROUNDINGS,
            )
            for _ in range(copies)
        ]

    def wait_until_ready(self) -> None:
        """Wait for the start of all of them."""
        for process in self._processes:
            if self._answer(process) != "ready":
                raise RuntimeError(f"{self.system} did not start; see above.")

    def measure(self, seconds: float) -> float:
        """Return frames per second, summed over the copies."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        answers = [self._answer(process).split() for process in self._processes]
        return sum(int(frames) / float(elapsed) for frames, elapsed in answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _answer(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"{self.system} ended; see above.")
        return answer


@dataclass(frozen=True)
class Row:
    """The figures of one task with one policy, one per repetition.

    Attributes:
        torchrl_options: the configuration that was best.
        torchrl_grid: frames/s of each configuration, measured once.
    """

    task: str
    policy: str
    bare: list[float]
    torchrl: list[float]
    ours: list[float]
    torchrl_options: dict[str, Any]
    torchrl_grid: list[float]

    def ratios(self, other: list[float]) -> Estimate:
        """Return ours to ``other``, paired by repetition."""
        pairs = zip(self.ours, other, strict=True)
        return Estimate.of([mine / theirs for mine, theirs in pairs])


def measure(task: str, policy: str, arguments: argparse.Namespace) -> Row:
    """Measure one row of the table."""
    workers, frames = arguments.workers, arguments.frames_per_batch

    def system(name: str, **options: Any) -> System:
        return System(name, task, policy, workers, frames, options)

    speeds = []
    for options in TORCHRL_GRID[: 1 if arguments.quick else None]:
        with Running(system("torchrl", **options)) as candidate:
            candidate.wait_until_ready()
            speeds.append(candidate.measure(arguments.seconds))
    best = TORCHRL_GRID[speeds.index(max(speeds))]
    figures: dict[str, list[float]] = {"bare": [], "torchrl": [], "ours": []}
    with (
        Running(system("bare"), workers) as bare,
        Running(system("torchrl", **best)) as torchrl,
        Running(system("ours")) as ours,
    ):
        everyone = [bare, torchrl, ours]
        for running in everyone:
            running.wait_until_ready()
        for repetition in range(arguments.repetitions):
            order = everyone if repetition % 2 == 0 else everyone[::-1]
            for running in order:
                speed = running.measure(arguments.seconds)
                figures[running.system.system].append(speed)
    return Row(task, policy, **figures, torchrl_options=best, torchrl_grid=speeds)


def table(rows: list[Row], workers: int) -> Table:
    """Return the figures for people."""
    shown = Table(title=f"Frames/s with {workers} workers: median (95 % interval)")
    for column in ("task", "policy", "bare loops", "TorchRL", "ours"):
        shown.add_column(column)
    shown.add_column("ours / bare")
    shown.add_column("ours / TorchRL")
    for row in rows:
        speeds = (str(Estimate.of(x)) for x in (row.bare, row.torchrl, row.ours))
        ratios = (str(row.ratios(other)) for other in (row.bare, row.torchrl))
        shown.add_row(row.task, row.policy, *speeds, *ratios)
    return shown


def main() -> None:
    """Measure, print, and write the figures down."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short, and no grid")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--seconds", type=float, help="of one measurement")
    parser.add_argument("--frames-per-batch", type=int, default=1000)
    parser.add_argument("--tasks", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--policies", nargs="+", default=["mlp", "random"])
    parser.add_argument("--json", type=Path, default=Path("runs/throughput.json"))
    arguments = parser.parse_args()
    arguments.repetitions = arguments.repetitions or (2 if arguments.quick else 10)
    arguments.seconds = arguments.seconds or (1.0 if arguments.quick else 5.0)
    before = machine()
    console = Console(width=150)
    rows = []
    for task in arguments.tasks:
        for policy in arguments.policies:
            console.print(f"[dim]measuring {task} with {policy} ...")
            rows.append(measure(task, policy, arguments))
    console.print(table(rows, arguments.workers))
    console.print(f"{before['cores']} cores of {before['cpu']}, {before['versions']}")
    settings = {name: str(value) for name, value in vars(arguments).items()}
    result = {
        "machine": before,
        "load_average_after": os.getloadavg()[0],
        "settings": settings,
        "rows": [asdict(row) for row in rows],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    console.print(f"Every repetition is in {arguments.json}.")


if __name__ == "__main__":
    main()
