"""Trains the settings of papers, compares the returns, and writes docs/results.md.

    python benchmarks/reproduce.py run                  # all cells: days on two cores
    python benchmarks/reproduce.py run matrix --jobs 1  # cells of some tasks
    python benchmarks/reproduce.py page                 # docs/results.md

`run` trains in runs/reproduce; repeated, it goes on after any stop, and repeats neither
finished runs nor cells whose file is committed. `page` packs each cell whose runs are
finished into a file of `benchmarks/results/reproduce`, which is committed, and writes
the page from these. To train a cell anew, delete its file.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from marl_collect.training.results import Run, mean_cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "reproduce"
COMMITTED = ROOT / "benchmarks" / "results" / "reproduce"
PAGE = ROOT / "docs" / "results.md"
SEEDS: Final = 5
_VALUES, _ON_POLICY = ("iql", "vdn", "qmix"), ("ippo", "mappo", "ia2c", "maa2c")
CELLS: Final = [
    *(
        (f"matrix/{game}", algorithm)
        for game in ("climbing", *(f"penalty-{k}" for k in (0, 25, 50, 75, 100)))
        for algorithm in (*_VALUES, *_ON_POLICY)
    ),
    *(
        (f"lbforaging/{name}", algorithm)
        for name in ("8x8-2p-2f-coop", "10x10-3p-3f", "15x15-4p-3f")
        for algorithm in _VALUES
    ),
]
"""Task and algorithm of each cell, the cheapest first."""
MATRIX_FRAMES: Final = {
    **dict.fromkeys(_VALUES, 250_000),
    **dict.fromkeys(_ON_POLICY, 500_000),
}
"""Frames of a run on a matrix game, in place of the preset's, by algorithm."""


@dataclass(frozen=True)
class Reference:
    """A published return, or one of the reference when it was run again.

    Attributes:
        value: mean over seeds, as `Cell` counts it.
        source: where it is from.
    """

    value: float
    source: str


PUBLISHED: Final[dict[tuple[str, str], Reference]] = {}
"""Maximum returns of the paper, by cell. A value enters with its source only."""
_AGAIN = "EPyMARL at cbc38c0, its own settings, 3 seeds of 3"
RERUN: Final = {
    ("matrix/climbing", algorithm): Reference(125.0, _AGAIN)
    for algorithm in ("ippo", "qmix")
}
"""Maximum returns of the reference when it was run again, by cell."""

# The quantiles 0.975 of Student's distribution, by degrees of freedom: the ends of a
# 95 % interval of a mean are so many standard errors from it.
_STUDENT: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262}
_TOLERANCE: Final = 0.01


@dataclass(frozen=True)
class Cell:
    """Returns of one algorithm on one task, over seeds.

    Attributes:
        task: of the runs.
        setup: of the runs.
        frames: of each run.
        cpu_seconds: mean of the runs.
        returns: mean return of each evaluation, by seed. Rewards are those of an agent
            in matrix games, where all are equal, and those of the team elsewhere.
    """

    task: str
    setup: str
    frames: int
    cpu_seconds: float
    returns: list[list[float]]

    @property
    def maximum(self) -> tuple[float, float]:
        """Mean and half interval at the evaluation whose mean over seeds is highest.

        The first evaluation is that of untrained weights: in a game of a few actions,
        they may have a high return by luck.
        """
        _untrained, *trained = map(mean_interval, zip(*self.returns, strict=True))
        return max(trained)

    @property
    def average(self) -> tuple[float, float]:
        """Mean and half interval of each seed's mean over all evaluations."""
        return mean_interval([statistics.fmean(seed) for seed in self.returns])


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the length of its 95 % interval (Student)."""
    error = statistics.stdev(scores) / math.sqrt(len(scores))
    return statistics.fmean(scores), _STUDENT[len(scores) - 1] * error


def agrees(ours: tuple[float, float], reference: float) -> bool:
    """Return whether a reference is in our interval, or 1 % of it from our mean."""
    mean, half = ours
    return abs(mean - reference) <= max(half, _TOLERANCE * abs(reference))


def cell_of(runs: Sequence[Run]) -> Cell:
    """Return the cell of the finished runs of a setup.

    Raises:
        ValueError: if a run is not finished, if the evaluations differ in frames, or if
            the CPU time of a run is not known.
    """
    cpu_seconds = mean_cpu_seconds(runs)
    frames = {tuple(record.frames for record in run.evaluations) for run in runs}
    if any(run.best is None for run in runs) or len(frames) != 1:
        raise ValueError("The runs of a cell must be finished, with equal frames.")
    if cpu_seconds is None:
        raise ValueError("The CPU time of a run is not known: train this cell anew.")
    first = runs[0]
    per_agent = first.task.startswith("matrix/")
    return Cell(
        first.task,
        first.setup,
        first.evaluations[-1].frames,
        cpu_seconds,
        [
            [record.agent if per_agent else record.team for record in run.evaluations]
            for run in runs
        ],
    )


def name_of(task: str, algorithm: str) -> str:
    """Return the name of a cell's file and folder."""
    return f"{task.replace('/', '-')}-{algorithm}"


def path_of(name: str) -> Path:
    """Return the committed file of a cell."""
    return COMMITTED / f"{name}.json"


def run_cells(word: str, jobs: int) -> int:
    """Train the cells whose names contain a word; return the last exit code."""
    for task, algorithm in CELLS:
        name = name_of(task, algorithm)
        folder = RUNS / name
        done = path_of(name).exists() or len(finished(folder)) == SEEDS
        if word not in name or done:
            continue
        resume = ["--resume"] if any(folder.rglob("config.json")) else []
        command = [
            *(sys.executable, "-m", "marl_collect.cli.main", "compare", task),
            *("--preset", "epymarl", "--setup", f"{algorithm}-local-shared-ids"),
            *("--seeds", str(SEEDS), "--jobs", str(jobs), "--out", str(folder)),
        ]
        if task.startswith("matrix/"):
            command += ["--frames", str(MATRIX_FRAMES[algorithm])]
        code = subprocess.run([*command, *resume], check=False).returncode
        if code:  # Interrupted, or a run has failed: later cells would not tell.
            return code
    return 0


def finished(folder: Path) -> list[Run]:
    """Return the finished runs of a cell."""
    runs = [Run.read(path.parent) for path in sorted(folder.rglob("config.json"))]
    return [run for run in runs if run.best is not None]


def pack() -> None:
    """Write the file of each cell whose runs are finished."""
    for task, algorithm in CELLS:
        name = name_of(task, algorithm)
        runs = finished(RUNS / name)
        if len(runs) == SEEDS:
            COMMITTED.mkdir(parents=True, exist_ok=True)
            text = json.dumps(vars(cell_of(runs)), separators=(",", ":"))
            path_of(name).write_text(text + "\n")


_PAGE = """# Published results

Generated by `python benchmarks/reproduce.py page` from the runs of
`python benchmarks/reproduce.py run`: {seeds} seeds of each cell with
`marl-collect compare TASK --preset epymarl`, whose settings, sources and differences
`marl-collect compare --settings --preset epymarl` prints.

As in EPyMARL's paper ([Papoudakis et al.](https://arxiv.org/abs/2006.07869)), the
maximum return is that of the evaluation whose mean over seeds is highest, and the
average return is the mean over all evaluations of a run. Here the maximum is never that
of untrained weights. Both have a 95 % interval over seeds (Student). The returns of
matrix games are those of an agent. A reference agrees if it is in our interval of the
maximum, or {tolerance:.0%} of it from our mean. CPU seconds are the mean of a run, of
all threads of the process that trains and of the workers.

{lengths}

{table}

{missing}
"""
_HEAD = (
    "task",
    "algorithm",
    "maximum return",
    "average return",
    "frames",
    "CPU seconds",
    "paper",
    "reference, run again",
)


def page(cells: Sequence[Cell]) -> str:
    """Return docs/results.md for the finished cells."""
    rows = [_row(cell) for cell in cells]
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    done = {(cell.task, cell.setup.partition("-")[0]) for cell in cells}
    absent: dict[str, list[str]] = {}
    for task, algorithm in CELLS:
        if (task, algorithm) not in done:
            absent.setdefault(task, []).append(algorithm)
    missing = [f"- `{task}`: {', '.join(names)}" for task, names in absent.items()]
    sources = sorted({r.source for r in (*PUBLISHED.values(), *RERUN.values())})
    notes = [f"Sources of the references: {'; '.join(sources)}."]
    if not PUBLISHED:
        notes.append("No value of the paper is entered yet.")
    if missing:
        notes += ["", "Not trained yet:", "", *missing]
    text = _PAGE.format(
        seeds=SEEDS,
        tolerance=_TOLERANCE,
        lengths=_lengths(),
        table=table if rows else "No cell is finished.",
        missing="\n".join(notes),
    )
    return text.rstrip() + "\n"


def _lengths() -> str:
    """Return the sentence with the frames of runs on matrix games."""
    names: dict[int, list[str]] = {}
    for algorithm, frames in MATRIX_FRAMES.items():
        names.setdefault(frames, []).append(algorithm)
    parts = [f"{frames:,} frames ({', '.join(of)})" for frames, of in names.items()]
    return (
        f"Runs on matrix games have {' or '.join(parts)}, in place of the preset's "
        "number."
    )


def _row(cell: Cell) -> tuple[str, ...]:
    algorithm = cell.setup.partition("-")[0]
    key = (cell.task, algorithm)
    return (
        f"`{cell.task}`",
        algorithm,
        _interval(cell.maximum),
        _interval(cell.average),
        f"{cell.frames:,}",
        f"{cell.cpu_seconds:,.0f}",
        _compared(cell, PUBLISHED.get(key)),
        _compared(cell, RERUN.get(key)),
    )


def _interval(value: tuple[float, float]) -> str:
    return f"{value[0]:.2f} ± {value[1]:.2f}"


def _compared(cell: Cell, reference: Reference | None) -> str:
    if reference is None:
        return "-"
    verdict = "agrees" if agrees(cell.maximum, reference.value) else "differs"
    return f"{reference.value:.2f}: {verdict}"


def committed() -> list[Cell]:
    """Return the committed cells, in the order of `CELLS`."""
    paths = [path_of(name_of(*cell)) for cell in CELLS]
    data: list[Any] = [json.loads(path.read_text()) for path in paths if path.exists()]
    return [Cell(**entry) for entry in data]


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    trains = commands.add_parser("run", help="train the cells")
    trains.add_argument("word", nargs="?", default="", help="part of their names")
    trains.add_argument("--jobs", type=int, default=2, help="runs at a time")
    commands.add_parser("page", help="write docs/results.md")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run_cells(arguments.word, arguments.jobs)
    pack()
    PAGE.write_text(page(committed()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
