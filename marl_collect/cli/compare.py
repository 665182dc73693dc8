"""``marl-collect compare``: its options."""

from pathlib import Path
from typing import Annotated

import typer

from marl_collect.cli.comparing import CompareRequest, run, show_report
from marl_collect.cli.consoles import USER_ERROR, fail, user_errors
from marl_collect.cli.tasks import parse_settings

_WHAT = "What is compared"
_WHERE = "Where it goes"


def compare(  # noqa: PLR0913 - one argument per option
    task: Annotated[
        str | None,
        typer.Argument(
            help="Name of a task (see `marl-collect envs`), or `module:name` of a "
            "callable that builds an environment.",
            show_default=False,
        ),
    ] = None,
    *,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            help="One setup, such as `mappo-local-shared-ids`: ippo, mappo, vdn or "
            "qmix; what agents see; whether they share networks. Repeat for more.  "
            "[default: all that fit]",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(min=1, help="Runs of each setup.", rich_help_panel=_WHAT),
    ] = 3,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first.", rich_help_panel=_WHAT)
    ] = 0,
    frames: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Frames of each run: steps of environments, however many agents "
            "act.  [default: the task's]",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Worker processes of a run.", rich_help_panel=_WHAT),
    ] = 2,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Setting of the training, such as `gamma=0.95` or `ppo.lr=0.001`. "
            "Repeat for more.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Setting of the environment; VALUE is JSON or text. Repeat for more.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the runs and the report.  [default: runs/compare-TASK-N]",
            rich_help_panel=_WHERE,
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the runs in --out, from their last checkpoints.",
            rich_help_panel=_WHERE,
        ),
    ] = False,
    video: Annotated[
        bool,
        typer.Option(
            "--video",
            help="Film an episode of the best weights of each run.",
            rich_help_panel=_WHERE,
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Train nothing: print the tables of the runs in this folder, and "
            "write them, the curves and the JSON there.",
            rich_help_panel=_WHERE,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train the setups of TASK with several seeds, and compare them.

    Who shares a network, who sees what, whose critic sees all: each setup trains with
    the same frames and is evaluated on the same episodes. Every run has a folder with
    its configuration, progress, checkpoints and results. Ctrl-C keeps what is there.

    Example: `marl-collect compare simple_spread_v3 --frames 200000 --seeds 2`
    """
    if report is not None:
        raise typer.Exit(show_report(report))
    if task is None:
        raise fail("Name a TASK, or a folder with --report.", USER_ERROR)
    with user_errors(ValueError):
        request = CompareRequest(
            task=task,
            env_kwargs=parse_settings(env or []),
            setups=tuple(setup or ()),
            seeds=tuple(range(first_seed, first_seed + seeds)),
            frames=frames,
            workers=workers,
            settings=parse_settings(set_ or [], option="--set"),
            out=out,
            resume=resume,
            video=video,
        )
    raise typer.Exit(run(request))
