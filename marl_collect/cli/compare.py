"""Options of ``marl-collect compare``."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from marl_collect.cli.arguments import Settings, typed_arguments
from marl_collect.cli.comparing import CompareRequest, run, show_report, show_settings
from marl_collect.cli.consoles import USER_ERROR, fail, user_errors
from marl_collect.cli.tasks import parse_settings
from marl_collect.interop.loggers import LOGGERS
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.presets import PRESETS

_what = partial(typer.Option, rich_help_panel="What is compared")
_where = partial(typer.Option, rich_help_panel="Output")


def compare(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    task: Annotated[
        str | None,
        typer.Argument(
            help="Name of a task (see `marl-collect envs`), or `module:name` of a "
            "callable that returns an environment.",
        ),
    ] = None,
    *,
    setup: Annotated[
        list[str] | None,
        _what(
            help="A setup, such as `mappo-local-shared-ids`: algorithm "
            f"({', '.join(ALGORITHMS)}), observations (local or centralised), "
            "networks (shared or own), and optionally ids. Repeatable.  "
            "[default: all that fit the task]",
        ),
    ] = None,
    seeds: Annotated[int, _what(min=1, help="Runs per setup.")] = 5,
    first_seed: Annotated[int, _what(min=0, help="Seed of the first run.")] = 0,
    frames: Annotated[
        int | None,
        _what(
            min=1,
            help="Frames per run. A frame is one step of one environment, "
            "regardless of the number of agents.  [default: depends on the task]",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        _what(
            metavar="|".join(PRESETS),
            help="Settings of a published implementation, for the algorithms that it "
            "has. `--set`, `--frames` and `--workers` change them.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        _what(
            min=1,
            help="Runs at a time, each in its own process.  [default: number of cores]",
        ),
    ] = None,
    workers: Annotated[
        int | None, _what(min=1, help="Worker processes per run.  [default: 2]")
    ] = None,
    set_: Annotated[
        list[str] | None,
        _what(
            "--set",
            metavar="KEY=VALUE",
            help="Training setting, such as `gamma=0.95` or `ppo.lr=0.001`; "
            "`--settings` lists all. Repeatable.",
        ),
    ] = None,
    settings: Annotated[
        bool,
        _what(
            "--settings",
            help="Print every `--set` setting, its value for TASK and what it does, "
            "without training.",
        ),
    ] = False,
    env: Settings = None,
    out: Annotated[
        Path | None,
        _where(
            help="Folder for the runs and the report.  [default: runs/compare-TASK-N]"
        ),
    ] = None,
    resume: Annotated[
        bool,
        _where(
            "--resume", help="Resume the runs in --out from their last checkpoints."
        ),
    ] = False,
    video: Annotated[
        bool,
        _where(
            "--video",
            help="Record a video of one episode with the best weights of each run.",
        ),
    ] = False,
    logger: Annotated[
        str | None,
        _where(
            metavar="|".join(LOGGERS),
            help="Give the metrics to this logger of TorchRL.  [default: events for "
            "TensorBoard in the runs' folders]",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        _where(
            help="Print the tables for the runs in this folder and write tables, "
            "curves and JSON to it, without training.",
        ),
    ] = None,
) -> None:
    """Train setups on TASK with several seeds and compare them.

    Setups differ in the algorithm, in what each agent sees, and in whether agents share
    a network. All setups train for the same number of frames and are evaluated on the
    same episodes. Each run writes its configuration, progress, checkpoints and results
    to its own folder. Ctrl-C keeps these folders; `--resume` continues the runs.

    Example: `marl-collect compare simple_spread_v3 --frames 200000 --seeds 2`
    """
    if report is not None:
        if others := [name for name in typed_arguments(context) if name != "--report"]:
            raise fail(
                f"--report trains nothing: omit {', '.join(others)}.", USER_ERROR
            )
        raise typer.Exit(show_report(report))
    if task is None and not settings:
        raise fail("Expected a TASK, or a folder of runs with --report.", USER_ERROR)
    with user_errors(ValueError):
        request = CompareRequest(
            task=task or "",
            env_kwargs=parse_settings(env or []),
            setups=tuple(setup or ()),
            seeds=tuple(range(first_seed, first_seed + seeds)),
            frames=frames,
            preset=preset,
            jobs=jobs,
            workers=workers,
            settings=parse_settings(set_ or [], option="--set"),
            out=out,
            resume=resume,
            video=video,
            logger=logger,
        )
    raise typer.Exit(show_settings(request) if settings else run(request))
