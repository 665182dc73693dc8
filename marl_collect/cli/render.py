"""``marl-collect render``: writes a video of episodes that a policy plays."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from marl_collect.cli import arguments
from marl_collect.cli.consoles import err, out, user_errors
from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.runs import playing
from marl_collect.cli.tasks import find_curriculum
from marl_collect.errors import counted


def render(  # noqa: PLR0913 - one argument per option
    task: arguments.Task,
    *,
    target: Annotated[
        Path,
        typer.Option("--out", help="Video file: .mp4, .mkv, .mov or .gif."),
    ] = Path("video.mp4"),
    policy: arguments.Policy = None,
    centralised: arguments.AsInFile = False,
    share_params: arguments.AsInFile = True,
    episodes: arguments.Episodes = 1,
    max_frames_per_traj: arguments.MaxFramesPerTraj = None,
    stochastic: arguments.Stochastic = False,
    curriculum: arguments.Curriculum = None,
    level: arguments.Level = 0,
    overlay: Annotated[
        bool,
        typer.Option(help="Write episode, step and returns above the picture."),
    ] = True,
    fps: Annotated[float, typer.Option(min=1, help="Frames per second.")] = 30.0,
    seed: arguments.Seed = 0,
    env: arguments.Settings = None,
) -> None:
    """Play episodes of TASK in this process and write a video of them.

    Example: `marl-collect render multiwalker_v9 --policy weights.pt --out walk.mp4`
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame opens no window.
    with user_errors(ValueError, TypeError, ImportError, OSError):
        from marl_collect.rendering.video import check_video

        check_video(target)
        tasks = find_curriculum(curriculum, level)
    acting = PolicyRequest(policy or "", centralised, share_params, seed)
    preparing = playing(task, acting, env, max_frames_per_traj, pictures=True)
    with preparing as (what, factory, _, module):
        from marl_collect.rendering import play, write_video

        pictures = play(
            factory,
            module,
            episodes=episodes,
            max_frames_per_traj=what.max_frames_per_traj,
            deterministic=not stochastic,
            seed=seed,
            overlay=overlay,
            **tasks,
        )
        with err.status(Text(f"{what.task}: playing")):
            count = write_video(target, pictures, fps=fps)
    out.print(
        f"{target}: {counted(episodes, 'episode')}, {counted(count, 'picture')}",
        soft_wrap=True,
    )
