"""``marl-collect play``: plays episodes and prints their lengths and returns."""

from rich.table import Table
from rich.text import Text

from marl_collect.cli import arguments
from marl_collect.cli.consoles import err, out, user_errors
from marl_collect.cli.policies import PolicyRequest
from marl_collect.cli.runs import playing
from marl_collect.cli.tasks import find_curriculum
from marl_collect.errors import counted


def play(  # noqa: PLR0913 - one argument per option
    task: arguments.Task,
    *,
    policy: arguments.Policy = None,
    centralised: arguments.AsInFile = False,
    share_params: arguments.AsInFile = True,
    episodes: arguments.Episodes = 5,
    max_frames_per_traj: arguments.MaxFramesPerTraj = None,
    stochastic: arguments.Stochastic = False,
    curriculum: arguments.Curriculum = None,
    level: arguments.Level = 0,
    seed: arguments.Seed = 0,
    env: arguments.Settings = None,
) -> None:
    """Play episodes of TASK and print their lengths and returns.

    Writes no files. `marl-collect render` makes a video of the same episodes, unless a
    curriculum uses their numbers: here all have number 0.

    Example: `marl-collect play multiwalker_v9 --policy weights.pt`, or
    `marl-collect play runs/walk/ippo-local-shared/seed_0`
    """
    with user_errors(ValueError, TypeError):
        tasks = find_curriculum(curriculum, level)
    acting = PolicyRequest(policy or "", centralised, share_params, seed)
    preparing = playing(task, acting, env, max_frames_per_traj)
    with preparing as (what, factory, description, module):
        from marl_collect.evaluation.evaluator import evaluate

        with err.status(Text(f"{what.task}: playing {counted(episodes, 'episode')}")):
            played = evaluate(
                module,
                factory,
                episodes=episodes,
                deterministic=not stochastic,
                max_frames_per_traj=what.max_frames_per_traj,
                seeds=seed,
                **tasks,
            )
    table = Table(title=f"{what.task}: {counted(episodes, 'episode')}")
    columns = ["episode", "frames", "team", *(f"{g}, mean" for g in description.groups)]
    for column in columns:
        table.add_column(column, justify="right")
    for number, episode in enumerate(played.episodes):
        groups = [sum(r) / len(r) for r in episode.returns.values()]
        returns = [played.team_returns[number], *groups]
        cells = [f"{value:,.2f}" for value in returns]
        table.add_row(str(number), f"{episode.length:,}", *cells)
    table.add_section()
    means = [played.mean_team_return, *played.mean_group_returns.values()]
    table.add_row("mean", f"{played.mean_length:,.1f}", *(f"{m:,.2f}" for m in means))
    out.print(table)
