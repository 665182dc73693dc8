"""Trains all runs of a comparison, and writes the report."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from marl_collect.core.description import EnvDescription
from marl_collect.files.atomic import write_atomically
from marl_collect.models.saved_policy import CONFIG, load_policy
from marl_collect.programs.interruption import Interruption
from marl_collect.rendering import play, write_video
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.convolutions import pictures
from marl_collect.training.evaluating import (
    FINAL_SEED,
    evaluate_policy,
    evaluator_of,
)
from marl_collect.training.learner import NotFiniteError, learner_of
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.plots import plot_curves
from marl_collect.training.report import LEGEND, markdown, results_json
from marl_collect.training.results import RANDOM, read_random, read_runs
from marl_collect.training.run_folder import RESULT, RunFolder
from marl_collect.training.side_by_side import train_side_by_side
from marl_collect.training.trainer import (
    Task,
    Trainer,
    Watcher,
    differences,
    make_learner,
)

CURVES = "curves.png"
REPORT = "report.md"
RESULTS = "marl_eval.json"


@dataclass(frozen=True)
class Comparison:
    """The setups, seeds and options of a comparison.

    Attributes:
        task: of every run.
        setups: to compare.
        seeds: of the runs of each setup.
        options: of every run whose algorithm has no others.
        folder: of the runs' folders and the report.
        video: builds an environment that returns pictures, to record an episode with
            the best weights of each run. None: no videos.
        algorithm_options: of the runs of some algorithms.
        logger: of the metrics; see ``Trainer``.
    """

    task: Task
    setups: Sequence[Setup]
    seeds: Sequence[int]
    options: TrainingOptions
    folder: Path
    video: Callable[[], Any] | None = None
    algorithm_options: Mapping[str, TrainingOptions] = field(default_factory=dict)
    logger: str | None = None

    def options_of(self, setup: Setup) -> TrainingOptions:
        """Return the options of a setup's runs."""
        return self.algorithm_options.get(setup.algorithm, self.options)

    def path(self, setup: Setup, seed: int) -> Path:
        """Return the folder of a run."""
        return self.folder / setup.name / f"seed_{seed}"


def default_setups(
    description: EnvDescription, options: TrainingOptions
) -> list[Setup]:
    """Return the setups of all algorithms that an environment supports."""
    options = replace(options, initial=None)  # Checked with the setups that train.
    possible = []
    for setup in every_setup(description):
        try:
            make_learner(description, setup, options, 0)
        except (TypeError, ValueError):
            if learner_of(setup.algorithm).every_task:
                raise
            continue
        possible.append(setup)
    return possible


def every_setup(description: EnvDescription) -> list[Setup]:
    """Return the default setups of all algorithms, whether they fit or not."""
    ids = any(group.n_agents > 1 for group in description.groups.values())
    return [
        setup
        for algorithm in ALGORITHMS
        for setup in learner_of(algorithm).default_setups(algorithm, agent_ids=ids)
    ]


def check_setups(comparison: Comparison) -> None:
    """Build the learner of every setup, so that none fails after others were trained.

    Raises:
        TypeError: if a learner does not support the environment's spaces.
        ValueError: if it does not support an option; names the setup.
    """
    for setup in comparison.setups:
        options = comparison.options_of(setup)
        runs = [RunFolder(comparison.path(setup, seed)) for seed in comparison.seeds]
        if all(run.has_progress for run in runs):
            options = replace(options, initial=None)
        try:
            make_learner(comparison.task.description, setup, options, 0)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{setup.name} cannot be trained: {error}") from error


def check_settings(comparison: Comparison, names: Iterable[str]) -> None:
    """Check that each of the settings has an effect on at least one setup.

    Raises:
        ValueError: if one has none; names it.
    """
    setups = comparison.setups
    sees = bool(pictures(comparison.task.description))
    for name in names:
        blind = name in ("conv", "conv_dtype") and not sees
        if blind or all(
            learner_of(setup.algorithm).ignores(
                name, setup, comparison.options_of(setup)
            )
            for setup in setups
        ):
            raise ValueError(
                f"The setting {name} has no effect on "
                f"{', '.join(setup.name for setup in setups)}: omit it, or add a setup "
                "that reads it."
            )


def has_runs(folder: Path) -> bool:
    """Return whether a run has begun in a folder."""
    return any(folder.rglob(CONFIG))


def check_folder(folder: Path, *, resume: bool) -> None:
    """Check that new runs are not mixed with existing ones by accident.

    Runs that failed before their first checkpoint do not count: they begin again.

    Raises:
        ValueError: if the folder has runs but ``resume`` is False, or has none but
            ``resume`` is True.
    """
    runs = [RunFolder(path.parent) for path in folder.rglob(CONFIG)]
    if not resume and any(run.has_progress for run in runs):
        raise ValueError(
            f"{folder} has runs already: add --resume to continue them, or choose "
            "another folder with --out."
        )
    if resume and not runs:
        raise ValueError(f"{folder} has no runs to resume.")


def check_task(comparison: Comparison) -> None:
    """Check that the folder has no runs of another task, which no table could compare.

    Raises:
        ValueError: if it has; says what differs.
    """
    task = comparison.task
    here = {"task": task.name, "env_kwargs": task.env_kwargs}
    for path in sorted(comparison.folder.rglob(CONFIG)):
        run = RunFolder(path.parent)
        config = run.read_json(CONFIG)
        if not run.has_progress or not isinstance(config, dict):
            continue
        there = {name: config.get(name) for name in here}
        different = "; ".join(differences(there, json.loads(json.dumps(here))))
        if different:
            raise ValueError(
                f"{path.parent} has a run of another task: {different}. Choose another "
                "folder with --out."
            )


def check_video(comparison: Comparison) -> None:
    """Take pictures of one step if videos are wanted, to fail before training.

    Raises:
        ValueError: if the environment renders no pictures.
    """
    if comparison.video is not None:
        list(play(comparison.video, max_frames_per_traj=1, overlay=True))


def run_all(
    comparison: Comparison,
    begin: Callable[[Setup, int], Watcher],
    interruption: Interruption | None = None,
    *,
    jobs: int = 1,
) -> int:
    """Train every setup with every seed, and report after each run but the last one.

    Whoever calls it reports on all of them (``write_report``). All setups are
    trained with one seed before the next seed begins, so an interrupted comparison has
    trained every setup about equally often. Finished runs are not repeated. A run that
    cannot go on does not stop the others.

    Args:
        comparison: what to train.
        begin: returns the watcher of a run.
        interruption: see ``Trainer``.
        jobs: number of runs at a time. One is trained in this process, and an error
            of its environment is raised; several have a process each, and the error
            is told to the run's watcher.

    Returns:
        The number of runs that could not go on.

    Raises:
        BlockingIOError: if another process writes to the folder.
    """
    runs = [(s, seed) for seed, s in product(comparison.seeds, comparison.setups)]
    interruption = interruption or Interruption()
    train = partial(_train, comparison)
    results = [comparison.path(*run) / RESULT for run in runs]
    reported = sum(path.exists() for path in results)

    def ended() -> None:
        # A report takes seconds: none for runs that were finished before.
        nonlocal reported
        before, reported = reported, sum(path.exists() for path in results)
        if before < reported < len(results):
            # Whoever asks for the report in the end gets the error.
            with suppress(OSError, ValueError):
                write_report(comparison.folder)

    failed = 0
    with RunFolder(comparison.folder).lock():
        measure_random(comparison)
        if jobs > 1:
            return train_side_by_side(train, runs, jobs, begin, ended, interruption)
        for run in runs:
            watcher = begin(*run)
            try:
                train(run, watcher, interruption)
            except NotFiniteError as error:
                watcher.failed(error)
                failed += 1
                continue
            watcher.finished()
            ended()
    return failed


def _train(
    comparison: Comparison,
    run: tuple[Setup, int],
    watcher: Watcher,
    interruption: Interruption,
) -> None:
    """Train one run to its end, and record its video."""
    setup, seed = run
    path, options = comparison.path(setup, seed), comparison.options_of(setup)
    Trainer(
        comparison.task,
        setup,
        options,
        seed,
        path,
        watcher,
        interruption,
        comparison.logger,
    ).run()
    if comparison.video is not None:
        _record_video(comparison, comparison.video, path, options)


def _record_video(
    comparison: Comparison,
    factory: Callable[[], Any],
    run: Path,
    options: TrainingOptions,
) -> None:
    """Write a video of an episode with a run's best weights, unless there is one.

    Raises:
        ImportError: if imageio is not installed.
    """
    target = run / "videos" / "best.mp4"
    if target.exists():
        return
    pictures = play(
        factory,
        load_policy(run),
        max_frames_per_traj=options.max_frames_per_traj
        or comparison.task.description.time_limit
        or 1000,
        deterministic=options.deterministic,
        seed=FINAL_SEED,
        overlay=True,
    )
    target.parent.mkdir(exist_ok=True)
    write_video(target, pictures)


def measure_random(comparison: Comparison) -> None:
    """Evaluate random actions on the policies' final episodes, once per folder.

    What a failed start left is measured again: it may belong to another task.
    """
    folder = RunFolder(comparison.folder)
    begun = any(RunFolder(p.parent).has_progress for p in folder.path.rglob(CONFIG))
    if not begun or read_random(folder.path) is None:
        options, task = comparison.options, comparison.task
        about = {
            "task": task.name,
            "env_kwargs": task.env_kwargs,
            "options": asdict(options),
        }
        with evaluator_of(None, task.factory, options) as evaluator:
            record = evaluate_policy(
                evaluator, options, folder, about, frames=0, final=True
            )
        folder.write_json(RANDOM, asdict(record))


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
    text = json.dumps(results_json(runs), separators=(",", ":"))
    write_atomically(folder / RESULTS, text + "\n")
    page = markdown(runs, title, random, CURVES)
    write_atomically(folder / REPORT, f"{page}\n{LEGEND}\n")
    return page
