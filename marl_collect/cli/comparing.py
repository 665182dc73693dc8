"""Implementation of ``marl-collect compare``: trains the runs and prints the tables."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_collect.cli.collecting import free_folder
from marl_collect.cli.consoles import USER_ERROR, err, fail, out, user_errors
from marl_collect.cli.environment_errors import environment_errors, explain
from marl_collect.cli.tasks import find_factory
from marl_collect.errors import worker_error_of
from marl_collect.files.log_file import LOG
from marl_collect.parallel_env.cpus import effective_cpus
from marl_collect.processes.launcher import COLLECTOR_MODULES, start_server
from marl_collect.programs.interruption import Interruption

if TYPE_CHECKING:
    from marl_collect.training.comparison import Comparison
    from marl_collect.training.options import TrainingOptions
    from marl_collect.training.presets import Preset


@dataclass(frozen=True)
class CompareRequest:
    """The command's arguments, parsed; see ``marl-collect compare --help``."""

    task: str
    env_kwargs: dict[str, Any]
    setups: tuple[str, ...]
    seeds: tuple[int, ...]
    frames: int | None
    preset: str | None
    jobs: int | None
    workers: int | None
    settings: dict[str, Any]
    out: Path | None
    resume: bool
    video: bool
    logger: str | None


def run(request: CompareRequest) -> int:
    """Run the comparison and return the exit code.

    Raises:
        typer.Exit: after an error that was shown.
    """
    _check_extras(video=request.video)
    with user_errors(ValueError, ImportError, TypeError, OSError):
        comparison = _comparison(request)
    from marl_collect.cli.progress import live
    from marl_collect.cli.training_progress import TrainingProgress
    from marl_collect.training.comparison import has_runs, run_all

    runs, failed = len(comparison.setups) * len(comparison.seeds), 0
    jobs = min(request.jobs or effective_cpus(), runs)
    frames = {setup: comparison.options_of(setup).frames for setup in comparison.setups}
    progress = TrainingProgress(
        err,
        runs,
        sum(frames.values()) * len(comparison.seeds),
        comparison.folder / LOG,
        side_by_side=jobs > 1,
    )
    with Interruption() as interruption:
        try:
            with live(progress, err), _training_errors(comparison):
                failed = run_all(
                    comparison,
                    lambda setup, seed: progress.begin(setup, seed, frames[setup]),
                    interruption,
                    jobs=jobs,
                )
        except BaseException:
            # A library's context manager may turn KeyboardInterrupt into another error.
            if not interruption.happened:
                raise
        if interruption.happened:
            folder = comparison.folder
            err.print(
                f"Interrupted: the runs are in {folder}. To resume them, "
                f"repeat the command with --out {folder} --resume."
                if has_runs(folder)
                else "Interrupted before the first run began.",
                soft_wrap=True,
            )
            return interruption.exit_code
    show_report(comparison.folder)
    if failed:
        raise fail(
            f"{failed} of {runs} runs ended early, for the reasons above. The tables "
            "show the others."
        )
    return 0


@contextmanager
def _training_errors(comparison: "Comparison") -> Iterator[None]:
    """Print errors of runs and of their environments without our own traceback."""
    from marl_collect.training.comparison import has_runs

    task, folder = comparison.task, comparison.folder
    with user_errors(ValueError, TypeError, OSError):
        try:
            yield
        except Exception as error:
            if not worker_error_of(error):
                raise
            text = explain(error, task.name, task.env_kwargs)
            if has_runs(folder):
                text += f"\nThe runs are in {folder}: add --resume to continue them."
            raise fail(text) from error


def show_report(folder: Path) -> int:
    """Write the report of a folder, print its tables, and return the exit code."""
    _check_extras(video=False)
    with user_errors(ValueError, OSError):
        from marl_collect.training import report, results
        from marl_collect.training.comparison import CURVES, REPORT, write_report

        write_report(folder)
        runs, random = results.read_runs(folder), results.read_random(folder)
    for table in report.rich_tables(runs, runs[0].task):
        out.print(table, "")
    if unfinished := report.unfinished_runs(runs):
        out.print(f"{unfinished} To continue them, repeat the command with --resume.")
    for paragraph in report.findings(results.summarize(runs), random):
        out.print(paragraph)
    out.print()
    out.print(report.TERMINAL_LEGEND, style="dim")
    paths = ", ".join(str(folder / name) for name in (REPORT, CURVES))
    out.print(paths, soft_wrap=True)
    return 0


def _comparison(request: CompareRequest) -> "Comparison":
    from marl_collect.interop.loggers import check_logger
    from marl_collect.training.presets import task_env_kwargs

    if request.logger is not None:
        check_logger(request.logger)
    kwargs = dict(task_env_kwargs(request.task)) | request.env_kwargs
    factory = find_factory(request.task, kwargs)
    start_server(COLLECTOR_MODULES)  # It imports torch while this process does.
    from marl_collect.parallel_env.describe import describe
    from marl_collect.training import comparison as training
    from marl_collect.training.options import Setup
    from marl_collect.training.presets import find_preset
    from marl_collect.training.trainer import Task

    preset = find_preset(request.preset) if request.preset else None
    options = _options(request)
    if request.resume and request.out is None:
        raise ValueError("--resume needs --out, the folder of the runs to resume.")
    folder = request.out or free_folder(Path("runs"), f"compare-{request.task}")
    training.check_folder(folder, resume=request.resume)
    setups = [Setup.parse(name) for name in request.setups]
    with environment_errors(request.task, kwargs):
        task = Task(request.task, factory, describe(factory), kwargs)
    by_algorithm = {}
    if preset is not None:
        setups = setups or [Setup.parse(name) for name in preset.setups]
        limit = options.max_frames_per_traj or task.description.time_limit
        for algorithm in dict.fromkeys(setup.algorithm for setup in setups):
            settings = preset.settings_of(algorithm, limit)
            by_algorithm[algorithm] = _options(request, settings)
        options = by_algorithm[setups[0].algorithm]
        _print_preset(preset, by_algorithm)
    comparison = training.Comparison(
        task,
        setups or training.default_setups(task.description, options),
        request.seeds,
        options,
        folder,
        video=find_factory(request.task, kwargs, pictures=True)
        if request.video
        else None,
        algorithm_options=by_algorithm,
        logger=request.logger,
    )
    training.check_task(comparison)
    if not request.resume:  # Runs of earlier versions may have such settings.
        training.check_settings(comparison, request.settings)
    training.check_setups(comparison)
    with environment_errors(request.task, kwargs):
        training.check_video(comparison)
    return comparison


def show_settings(request: CompareRequest) -> int:
    """Print every setting, its value for the request, and what it does.

    The libraries of the task and of training need not be installed.

    Returns:
        The exit code.
    """
    from rich.table import Table

    from marl_collect.training.presets import task_settings

    with user_errors(ValueError):
        # Without its library, a task is found by its family's prefix only.
        if request.task and not task_settings(request.task):
            with suppress(ImportError):
                find_factory(request.task, {})
        if request.preset is not None:
            changes = (request.settings, request.setups, request.frames)
            if any(changes) or request.workers is not None:
                raise ValueError(
                    "--settings --preset prints the preset alone: omit the options "
                    "that change it."
                )
            return _show_preset(request.preset)
        options = _options(request)
    table = Table("setting", "value", "meaning", box=None, padding=(0, 2, 0, 0))
    texts = options.help_texts()
    for name, value in options.settings().items():
        table.add_row(name, json.dumps(value), texts[name])
    out.print(table)
    return 0


def _show_preset(name: str) -> int:
    """Print the settings of a preset by algorithm, and return the exit code."""
    from rich.table import Column, Table

    from marl_collect.training.presets import Episodes, find_preset

    preset = find_preset(name)
    _print_preset(preset, preset.settings)
    heading = Column("setting", no_wrap=True)  # Values wrap before names are cut.
    table = Table(heading, *preset.settings, box=None, padding=(0, 1, 0, 0))
    names = [name for settings in preset.settings.values() for name in settings]
    for setting in dict.fromkeys(names):
        values = [settings.get(setting, "") for settings in preset.settings.values()]
        texts = [
            f"{value.count} episodes"
            if isinstance(value, Episodes)
            else json.dumps(value).strip('"')
            for value in values
        ]
        table.add_row(setting, *texts)
    out.print(table)
    return 0


def _print_preset(preset: "Preset", algorithms: Iterable[str]) -> None:
    """Print the source of the settings, and what cannot be set like there."""
    err.print(f"Settings of {preset.source}.", soft_wrap=True)
    for algorithm in algorithms:
        if missing := preset.missing.get(algorithm):
            err.print(f"Not as there, {algorithm}: {missing}.", soft_wrap=True)


def _options(
    request: CompareRequest, settings: Mapping[str, Any] | None = None
) -> "TrainingOptions":
    """Return options with the request's settings.

    Args:
        request: of the command.
        settings: those of a preset. None: those of the task.
    """
    from marl_collect.training.options import TrainingOptions
    from marl_collect.training.presets import task_settings

    for name in ("frames", "workers"):
        if getattr(request, name) is not None and name in request.settings:
            raise ValueError(f"--{name} and --set {name}= are the same: pass one.")
    settings = dict(task_settings(request.task) if settings is None else settings)
    if request.workers is not None:
        settings["workers"] = request.workers
    if request.frames is not None:
        settings["frames"] = request.frames
        # Ten evaluations at least, however short the run is.
        usual = TrainingOptions().with_settings(settings).eval_interval
        settings["eval_interval"] = min(usual, -(-request.frames // 10))
    return TrainingOptions().with_settings(settings | request.settings)


def _check_extras(*, video: bool) -> None:
    """Check that the libraries of this command are installed.

    Raises:
        typer.Exit: if one is missing, after printing the command that installs it.
    """
    needed = {"matplotlib": "compare"}
    if video:
        needed["imageio"] = "video"
    missing = {extra for name, extra in needed.items() if find_spec(name) is None}
    if missing:
        extras = ",".join(sorted(missing))
        raise fail(
            "This command needs libraries that are not installed: pip install "
            f"'marl-collect[{extras}]'.",
            USER_ERROR,
        )
