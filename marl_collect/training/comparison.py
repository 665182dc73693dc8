"""Trains all runs of a comparison one after the other, and writes the report."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gymnasium import spaces

from marl_collect.parallel_env.describe import describe
from marl_collect.storage.files import write_atomically
from marl_collect.training.evaluating import (
    EvaluationRecord,
    evaluate_policy,
    evaluator_of,
)
from marl_collect.training.options import Setup, TrainingOptions, grid
from marl_collect.training.plots import plot_curves, plot_scores
from marl_collect.training.report import markdown, results_json
from marl_collect.training.results import Run, read_runs
from marl_collect.training.run_folder import RunFolder
from marl_collect.training.trainer import Task, Trainer, Watcher
from marl_collect.training.video import record_video

CURVES = "curves.png"
SCORES = "scores.png"
REPORT = "report.md"
RESULTS = "marl_eval.json"
RANDOM = "random.json"


@dataclass(frozen=True)
class Comparison:
    """The setups, seeds and options of a comparison.

    Attributes:
        task: name.
        factory: builds the environment; must accept ``agent_ids=True`` for setups with
            identities.
        env_kwargs: keyword arguments of the environment, for the configuration files.
        setups: to compare.
        seeds: of the runs of each setup.
        options: of every run.
        folder: of the runs' folders and the report.
        video: whether to record an episode with the best weights of each run.
    """

    task: str
    factory: Any
    env_kwargs: dict[str, Any]
    setups: Sequence[Setup]
    seeds: Sequence[int]
    options: TrainingOptions
    folder: Path
    video: bool = False

    def path(self, setup: Setup, seed: int) -> Path:
        """Return the folder of a run."""
        return self.folder / setup.name / f"seed_{seed}"


class ComparisonWatcher(Protocol):
    """Is notified when a run begins."""

    def begin(self, setup: Setup, seed: int) -> Watcher:
        """Return the watcher of that run."""
        ...


def default_setups(factory: Any, *, agent_ids: bool) -> list[Setup]:
    """Return the setups that an environment supports; see ``options.grid``."""
    groups = describe(factory).groups.values()
    discrete = len(groups) == 1 and all(
        isinstance(group.action, spaces.Discrete) for group in groups
    )
    return grid(discrete=discrete, agent_ids=agent_ids)


def check_folder(folder: Path, *, resume: bool) -> None:
    """Check that new runs are not mixed with existing ones by accident.

    Raises:
        ValueError: if the folder has runs but ``resume`` is False, or has none but
            ``resume`` is True.
    """
    there = any(folder.rglob("config.json"))
    if there and not resume:
        raise ValueError(
            f"{folder} has runs already: add --resume to continue them, or choose "
            "another folder with --out."
        )
    if resume and not there:
        raise ValueError(f"{folder} has no runs to resume.")


def run_all(comparison: Comparison, watcher: ComparisonWatcher) -> list[Run]:
    """Train every setup with every seed, and write the report after each run.

    Finished runs are not repeated.

    Raises:
        BlockingIOError: if another process writes to the folder.
    """
    with RunFolder(comparison.folder).lock():
        return _run_all(comparison, watcher)


def _run_all(comparison: Comparison, watcher: ComparisonWatcher) -> list[Run]:
    measure_random(comparison)
    for setup, seed, task in _runs(comparison):
        path = comparison.path(setup, seed)
        trainer = Trainer(
            task, setup, comparison.options, seed, path, watcher.begin(setup, seed)
        )
        trainer.run()
        if comparison.video:
            film = path / "videos" / "best.mp4"
            if not film.exists():
                record_video(task, setup, comparison.options, RunFolder(path), film)
        write_report(comparison.folder)
    return read_runs(comparison.folder)


def measure_random(comparison: Comparison) -> None:
    """Evaluate random actions on the policies' final episodes, once per folder."""
    folder = RunFolder(comparison.folder)
    if folder.read_json(RANDOM) is None:
        options = comparison.options
        with evaluator_of(None, comparison.factory, options) as evaluator:
            record = evaluate_policy(evaluator, options, frames=0, final=True)
        folder.write_json(RANDOM, record.as_dict())


def write_report(folder: Path) -> str:
    """Write tables, learning curves and marl-eval's JSON for the runs in a folder.

    Returns:
        The report in Markdown.

    Raises:
        ValueError: if there are no runs.
    """
    runs = read_runs(folder)
    random = read_random(folder)
    title = runs[0].task
    plot_curves(runs, title, folder / CURVES, random)
    scored = any(run.best is not None for run in runs)
    if scored:
        plot_scores(runs, title, folder / SCORES, random)
    text = json.dumps(results_json(runs), separators=(",", ":"))
    write_atomically(folder / RESULTS, text + "\n")
    page = markdown(runs, title, random, CURVES, SCORES if scored else None)
    write_atomically(folder / REPORT, page)
    return page


def read_random(folder: Path) -> EvaluationRecord | None:
    """Return the evaluation of random actions, or None if there is none."""
    path = folder / RANDOM
    if not path.exists():
        return None
    return EvaluationRecord.from_dict(json.loads(path.read_text("utf-8")))


def _runs(comparison: Comparison) -> Iterator[tuple[Setup, int, Task]]:
    """Yield all setups of one seed, then of the next.

    An interrupted comparison has thus trained every setup about equally often.
    """
    tasks: dict[bool, Task] = {}
    for seed in comparison.seeds:
        for setup in comparison.setups:
            if setup.agent_ids not in tasks:
                tasks[setup.agent_ids] = _task(comparison, agent_ids=setup.agent_ids)
            yield setup, seed, tasks[setup.agent_ids]


def _task(comparison: Comparison, *, agent_ids: bool) -> Task:
    kwargs, factory = comparison.env_kwargs, comparison.factory
    if agent_ids:
        kwargs = kwargs | {"agent_ids": True}
        factory = partial(factory, agent_ids=True)
    return Task(comparison.task, factory, describe(factory), kwargs)
