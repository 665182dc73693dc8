"""Options of ``marl-collect collect``."""

import secrets
from functools import partial
from typing import Annotated

import typer

from marl_collect.cli.arguments import (
    POLICY_HELP,
    Curriculum,
    Level,
    Settings,
    not_empty,
)
from marl_collect.cli.collecting import batch_frames, run
from marl_collect.cli.consoles import user_errors
from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.runs import what_to_play
from marl_collect.cli.tasks import find_curriculum

_amount = partial(typer.Option, rich_help_panel="How much")
_acting = partial(typer.Option, rich_help_panel="Policy")
_FRAMES = 10_000


def collect(  # noqa: PLR0913 - one argument per option
    task: Annotated[
        str,
        typer.Argument(
            help="Name of a task (see `marl-collect envs`), `module:name` of a "
            "callable that returns an environment, or the folder of a `compare` run, "
            "which supplies task, settings and policy. A run of your own `module:name` "
            "needs the name, and `--policy RUN`.",
        ),
    ],
    *,
    frames: Annotated[
        int | None,
        _amount(
            min=1,
            help="Frames to collect, rounded up to whole batches. A frame is one step "
            "of one environment, regardless of the number of agents.  "
            "[default: 10000]",
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        _amount(
            min=1,
            help="Collect exactly this many complete episodes instead of frames, "
            "spread evenly over the environments.",
        ),
    ] = None,
    workers: Annotated[int, _amount(min=1, help="Worker processes.")] = 1,
    envs_per_worker: Annotated[
        int,
        _amount(
            min=1, help="Environments per worker; one forward pass serves all of them."
        ),
    ] = 1,
    frames_per_batch: Annotated[
        int | None,
        _amount(
            min=1,
            help="Frames per batch, over all environments.  [default: about 2000]",
        ),
    ] = None,
    max_frames_per_traj: Annotated[
        int | None, _amount(min=1, help="Truncate trajectories at this length.")
    ] = None,
    policy: Annotated[str | None, _acting(help=POLICY_HELP, callback=not_empty)] = None,
    centralised: Annotated[
        bool, _acting(help="Each agent sees the observations of its whole group.")
    ] = False,
    share_params: Annotated[
        bool, _acting(help="The agents of a group share one network.")
    ] = True,
    curriculum: Curriculum = None,
    level: Level = 0,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed for environments, weights and actions.  [default: random]",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Dataset folder. Batches are appended to an existing dataset of the "
            "same task. A URL, such as `s3://bucket/data`: batches are written to a "
            "new folder in runs, and its files are copied.  [default: runs/TASK-N]",
        ),
    ] = None,
    env: Settings = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the folder.")
    ] = False,
) -> None:
    """Collect experience on TASK and write it to a folder.

    Batches are written during collection, each completely or not at all. Ctrl-C stops
    collection within seconds and keeps complete batches. Open the folder in Python with
    `marl_collect.storage.open_dataset`, or print a summary with `marl-collect inspect`.

    Example: `marl-collect collect multiwalker_v9 --frames 20000 --workers 2`
    """
    seed = secrets.randbelow(2**31 - 1) if seed is None else seed
    with user_errors(ValueError, TypeError, ImportError, OSError):
        if frames is not None and episodes is not None:
            raise ValueError("Pass either --frames or --episodes, not both.")
        acting = PolicyRequest(policy or "", centralised, share_params, seed)
        what = what_to_play(task, acting, env, max_frames_per_traj)
        tasks = find_curriculum(curriculum, level)
    amount = None if episodes is not None else frames or _FRAMES
    settings = {
        "frames": amount,
        "episodes": episodes,
        "frames_per_batch": batch_frames(
            amount, workers * envs_per_worker, frames_per_batch
        ),
        "num_workers": workers,
        "envs_per_worker": envs_per_worker,
        "seed": seed,
        **tasks,
    }
    raise typer.Exit(run(what, out, settings, quiet=quiet))
