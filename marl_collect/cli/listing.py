"""``marl-collect envs`` and ``marl-collect info``: the tasks, and details of one."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from marl_collect.cli.arguments import Settings
from marl_collect.cli.consoles import err, fail, out, user_errors
from marl_collect.processes.launcher import COLLECTOR_MODULES, start_server

if TYPE_CHECKING:
    from marl_collect.core.description import EnvDescription

_LIMITS = ("max_steps", "max_cycles")
"""Names of the keyword argument that limits an episode."""


def envs(
    text: Annotated[
        str, typer.Argument(help="Show only tasks whose name contains this text.")
    ] = "",
) -> None:
    """List all tasks, with install commands for tasks whose libraries are missing.

    Small families come first.
    """
    from marl_collect.cli.tasks import available_tasks

    with user_errors(ValueError):
        tasks = available_tasks()
    # A large family does not bury the others.
    sizes = Counter(name.split("/")[0] for name in tasks)
    by_size = sorted(tasks.items(), key=lambda task: sizes[task[0].split("/")[0]])
    chosen = {name: missing for name, missing in by_size if text in name}
    if not chosen:
        families = ", ".join(sorted({name.split("/")[0] for name in tasks}))
        raise fail(
            f"No task contains {text!r}. Families of tasks: {families}. "
            "`marl-collect envs` lists all tasks."
        )
    for name, missing in chosen.items():
        if not missing:
            out.print(name, style="bold", soft_wrap=True)
    incomplete: dict[str, list[str]] = {}
    for name, missing in chosen.items():
        if missing:
            incomplete.setdefault(missing, []).append(name)
    for missing, names in incomplete.items():
        out.print(f"\nAfter: {missing}", soft_wrap=True)
        for name in names:
            out.print(f"  {name}", style="dim", soft_wrap=True)
    ready = sum(1 for missing in chosen.values() if not missing)
    err.print(f"Available tasks: {ready}. Details: marl-collect info TASK")


def info(
    task: Annotated[str, typer.Argument(help="Name of a task; see `envs`.")],
    env: Settings = None,
) -> None:
    """Build one environment of TASK and show its groups, spaces, keys and settings.

    Example: `marl-collect info simple_spread_v3 --env N=5`
    """
    from marl_collect.cli.environment_errors import environment_errors
    from marl_collect.cli.tasks import find_factory, parse_settings, task_settings

    with user_errors(ValueError, ImportError):
        chosen = parse_settings(env or [])
        factory = find_factory(task, chosen)
    start_server(COLLECTOR_MODULES)  # It imports torch while this process does.
    from marl_collect.cli import summary
    from marl_collect.parallel_env.describe import describe
    from marl_collect.storage.card import groups_table

    with environment_errors(task, chosen):
        description = describe(factory)
    settings = task_settings(task) | chosen
    end = "one agent is done" if description.done_on_any else "all agents are done"
    rows = [
        ("task", task),
        ("environment", description.name),
        ("agents", str(sum(g.n_agents for g in description.groups.values()))),
        ("time limit", _time_limit(description, settings)),
        ("episode ends", f"as soon as {end}"),
        ("reproducible", "yes, by seed" if description.repeats else "no"),
    ]
    out.print(summary.facts(rows))
    out.print(summary.table_of(groups_table(description)))
    out.print(summary.keys_table(description))
    if not settings:
        return
    table = Table(title="Settings (--env KEY=VALUE)")
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in settings.items():
        mark = " (given)" if name in chosen else ""
        table.add_row(name, f"{value!r}{mark}")
    out.print(table)


def _time_limit(description: "EnvDescription", settings: Mapping[str, Any]) -> str:
    if description.time_limit is not None:
        return f"{description.time_limit} frames"
    for name in _LIMITS:
        if isinstance(settings.get(name), int):
            return f"{settings[name]} frames ({name})"
    return "not known; --max-frames-per-traj sets one"
