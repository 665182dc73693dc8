"""``marl-collect envs`` and ``marl-collect info``: the tasks, and details of one."""

from typing import Annotated

import typer
from rich.table import Table

from marl_collect.cli.consoles import err, out, user_errors


def envs(
    text: Annotated[
        str, typer.Argument(help="Show only tasks whose name contains this.")
    ] = "",
) -> None:
    """List all tasks, and what to install for those that are not available."""
    from marl_collect.cli.tasks import available_tasks

    with user_errors(ValueError):
        tasks = available_tasks()
    table = Table(box=None)
    table.add_column("task", style="bold", overflow="fold")
    table.add_column("missing", overflow="fold")
    chosen = {name: missing for name, missing in tasks.items() if text in name}
    for name, missing in chosen.items():
        table.add_row(name, missing, style="dim" if missing else None)
    out.print(table)
    ready = sum(1 for missing in chosen.values() if not missing)
    err.print(f"Available tasks: {ready}. Details: marl-collect info TASK")


def info(
    task: Annotated[str, typer.Argument(help="Name of a task; see `envs`.")],
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Keyword argument of the environment."),
    ] = None,
) -> None:
    """Build one environment of TASK and show its groups, spaces and keys."""
    from marl_collect.cli.summary import (
        environment_keys,
        facts,
        groups_table,
        keys_table,
    )
    from marl_collect.cli.tasks import find_factory, parse_settings
    from marl_collect.parallel_env.describe import describe

    with user_errors(ValueError, ImportError):
        factory = find_factory(task, parse_settings(env or []))
    with user_errors(ValueError, TypeError, ImportError):
        description = describe(factory)
    limit = description.time_limit
    rows = [
        ("task", task),
        ("environment", description.name),
        ("agents", str(sum(g.n_agents for g in description.groups.values()))),
        ("time limit", "not known" if limit is None else f"{limit} frames"),
        ("ends with its", "first agent" if description.done_on_any else "last agent"),
        ("seeds repeat", "yes" if description.repeats else "no"),
    ]
    out.print(facts(rows))
    out.print(groups_table(description))
    out.print(keys_table(environment_keys(description), title="Keys"))
