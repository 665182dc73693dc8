"""Results of runs, read from their folders and aggregated over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from marl_collect.evaluation.intervals import Interval, bootstrap
from marl_collect.models.saved_policy import CONFIG
from marl_collect.programs.printable import printable
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.run_folder import (
    EVALUATIONS,
    RESULT,
    RunFolder,
    read_json,
)

RANDOM = "random.json"
"""In the folder of a comparison: the evaluation of random actions."""
_WRONG = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What reading an entry raises that is missing or of another type."""


@dataclass(frozen=True)
class Run:
    """One run: its configuration and its results.

    Attributes:
        task: name of the task.
        setup: name of the setup.
        seed: of the run.
        options: as in ``config.json``.
        evaluations: evaluations during training, oldest first.
        best: final evaluation of the best evaluation's weights; None if the run is not
            finished.
        last: final evaluation of the last weights, on the same episodes.
        training: mean return and length of the last hundred training episodes, in
            which actions are sampled; empty if no episode ended.
        seconds: time spent collecting, training and evaluating.
        policy_parameters: number of parameters of the policy; None if the run is not
            finished.
        updates: gradient steps; None if the run is not finished or older.
        cpu_seconds: of all threads of the run's process and its workers; None if the
            run is not finished or older, or if the system did not tell.
    """

    task: str
    setup: str
    seed: int
    options: dict[str, Any]
    evaluations: list[EvaluationRecord]
    best: EvaluationRecord | None
    last: EvaluationRecord | None
    training: dict[str, float]
    seconds: dict[str, float]
    policy_parameters: int | None = None
    updates: int | None = None
    cpu_seconds: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's folder.

        Raises:
            ValueError: if the folder has no ``config.json``, or if a file is damaged.
        """
        load = RunFolder(folder).read_json
        config = load(CONFIG)
        if config is None:
            raise ValueError(
                f"{folder} has no {CONFIG}: it is not the folder of a run."
            )
        result, evaluated = load(RESULT), load(EVALUATIONS) or []
        try:
            run = cls._parse(config, result, evaluated)
        except _WRONG as error:
            raise ValueError(
                f"{folder} is damaged: an entry of {CONFIG}, {RESULT} or {EVALUATIONS} "
                f"is missing or wrong ({type(error).__name__}: {error}). Delete the "
                "folder to train this run again."
            ) from error
        if run.best is not None and not run.evaluations:
            raise ValueError(
                f"{folder} has the {RESULT} of a finished run, but no evaluations in "
                f"{EVALUATIONS}. Delete the folder to train this run again."
            )
        return run

    @classmethod
    def _parse(cls, config: Any, result: Any, evaluated: Any) -> Self:
        evaluations = [_record(entry) for entry in evaluated]
        finished = result is not None
        result = result if finished else {}
        options = config["options"]
        int(options["frames"])  # Reports and pages compare it with the frames so far.
        return cls(
            printable(str(config["task"])),  # Somebody else may have written it.
            printable(str(config["setup"])),
            config["seed"],
            options,
            evaluations,
            _record(result["best"]) if finished else None,
            _record(result["last"]) if finished else None,
            result.get("training", {}),
            result.get("seconds", {}),
            result.get("policy_parameters"),
            result.get("updates"),
            result.get("cpu_seconds"),
        )

    @property
    def peak(self) -> EvaluationRecord:
        """The best evaluation during training; of equal ones the newest.

        Untrained weights count if nothing else was evaluated yet.
        """
        trained = [record for record in self.evaluations if record.frames]
        evaluations = trained or self.evaluations
        return max(reversed(evaluations), key=lambda record: record.team)

    @property
    def collected_per_second(self) -> float:
        """Frames per second of time spent waiting for batches."""
        return self.evaluations[-1].frames / self.seconds["collecting"]

    @property
    def trained_per_second(self) -> float:
        """Frames per second of time spent training."""
        return self.evaluations[-1].frames / self.seconds["training"]


def read_runs(folder: Path) -> list[Run]:
    """Read all evaluated runs below ``folder``, sorted by path.

    Raises:
        ValueError: if there are none.
    """
    runs = [Run.read(path.parent) for path in sorted(folder.rglob(CONFIG))]
    runs = [run for run in runs if run.evaluations]
    if not runs:
        raise ValueError(f"There are no evaluated runs below {folder}.")
    return runs


def read_random(folder: Path) -> EvaluationRecord | None:
    """Return the evaluation of random actions, or None if there is none.

    Raises:
        ValueError: if the file is damaged; names it.
    """
    path = folder / RANDOM
    if not path.exists():
        return None
    try:
        return _record(read_json(path))
    except _WRONG as error:
        raise ValueError(
            f"{path} is damaged. Delete this file and repeat the command with "
            "--resume: random actions are evaluated again."
        ) from error


def _record(entry: Any) -> EvaluationRecord:
    """Return an evaluation from a file.

    Raises:
        TypeError: if a value is missing or not a number.
        ValueError: if a value is not finite.
        ArithmeticError: if there is no episode, or no agent.
    """
    record = EvaluationRecord(**entry)
    if not all(map(math.isfinite, (record.frames, record.agent, record.length))):
        raise ValueError("an evaluation is not finite")
    return record


TEAM, AGENT = "team", "agent"
BEST_WEIGHTS = "best weights"
LAST_WEIGHTS = "last weights"
SAMPLED_ACTIONS = "sampled actions"
RETURNS = (BEST_WEIGHTS, LAST_WEIGHTS, SAMPLED_ACTIONS, "best evaluation")
"""The returns in a summary, in the order of the tables' columns.

Best and last weights are evaluated after training on new episodes. Sampled actions are
the last hundred training episodes. The best evaluation comes last: it is the maximum of
the evaluations that chose the best weights, so it is biased upwards.
"""


@dataclass(frozen=True)
class Summary:
    """The finished runs of one setup, aggregated over seeds.

    Attributes:
        setup: name of the setup.
        seeds: number of runs.
        returns: by ``TEAM`` or ``AGENT`` and a name of ``RETURNS``: the return of the
            team, or per agent. NaN if no training episode ended.
        length: of the final episodes with the best weights.
        collected: frames per second of time spent collecting.
        trained: frames per second of time spent training.
        policy_parameters: of the first run; None if not recorded.
        scores: return of the team of each run's best weights.
        updates: gradient steps of the first run; None if not recorded.
        cpu_seconds: mean of the runs; None if not recorded of all.
    """

    setup: str
    seeds: int
    returns: dict[tuple[str, str], Interval]
    length: Interval
    collected: float
    trained: float
    policy_parameters: int | None
    scores: list[float]
    updates: int | None
    cpu_seconds: float | None


def by_setup(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each setup, in the order of their first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setup, []).append(run)
    return groups


def summarize(runs: Sequence[Run]) -> list[Summary]:
    """Aggregate finished runs by setup, in the order of their first appearance."""
    finished = by_setup([run for run in runs if run.best is not None])
    return [_summary(name, group) for name, group in finished.items()]


def _summary(setup: str, runs: Sequence[Run]) -> Summary:
    best = [run.best for run in runs if run.best is not None]
    last = [run.last for run in runs if run.last is not None]
    returns = {}
    for whose in (TEAM, AGENT):
        sampled = [run.training.get(f"return_{whose}") for run in runs]
        values = [
            [getattr(record, whose) for record in best],
            [getattr(record, whose) for record in last],
            [value for value in sampled if value is not None],
            [getattr(run.peak, whose) for run in runs],
        ]
        for name, scores in zip(RETURNS, values, strict=True):
            returns[whose, name] = _over_seeds(scores)
    return Summary(
        setup,
        len(runs),
        returns,
        length=_over_seeds([record.length for record in best]),
        collected=sum(run.collected_per_second for run in runs) / len(runs),
        trained=sum(run.trained_per_second for run in runs) / len(runs),
        policy_parameters=runs[0].policy_parameters,
        scores=[record.team for record in best],
        updates=runs[0].updates,
        cpu_seconds=mean_cpu_seconds(runs),
    )


def mean_cpu_seconds(runs: Sequence[Run]) -> float | None:
    """Return the mean CPU time of runs; None if it is not recorded of all."""
    known = [run.cpu_seconds for run in runs if run.cpu_seconds is not None]
    return sum(known) / len(known) if len(known) == len(runs) else None


def _over_seeds(scores: Sequence[float]) -> Interval:
    """Return the interquartile mean of scores; a single one has no interval."""
    if len(scores) > 1:
        return bootstrap([scores])
    return Interval(scores[0] if scores else math.nan)
