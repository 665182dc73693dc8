"""Tables of data, groups and spaces."""

from collections.abc import Mapping, Sequence

from rich.table import Column, Table

from marl_collect.core.description import EnvDescription, Field, Key
from marl_collect.errors import counted
from marl_collect.storage import card as storage


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def returns_table(
    environment: EnvDescription, episodes: int, returns: Mapping[str, Sequence[float]]
) -> Table:
    """Return a table of each agent's mean return, and their sum.

    Args:
        environment: of the dataset.
        episodes: how many.
        returns: sum over all episodes of each agent's return, by group.
    """
    title = f"Mean return of {counted(episodes, 'episode')}"
    table = Table("group", "agent", Column("return", justify="right"), title=title)
    for name, sums in returns.items():
        for agent, total in zip(environment.groups[name].agents, sums, strict=True):
            table.add_row(name, agent, f"{total / episodes:,.3f}")
    table.add_section()
    team = sum(map(sum, returns.values())) / episodes
    table.add_row("all", "team sum", f"{team:,.3f}", style="bold")
    return table


def table_of(table: storage.Table) -> Table:
    """Return a table of a dataset's card."""
    title, columns, rows = table
    shown = Table(title=title)
    for name in columns:
        is_number = name in storage.NUMBERS
        shown.add_column(
            name, justify="right" if is_number else "left", overflow="fold"
        )
    for row in rows:
        shown.add_row(*row)
    return shown


def keys_table(environment: EnvDescription) -> Table:
    """Return a table of an environment's keys, as in a batch."""
    names = ("key", "shape of a frame", "dtype")
    table = Table(*(Column(name, overflow="fold") for name in names), title="Keys")
    for key, field in environment_keys(environment).items():
        name = repr(key[0] if len(key) == 1 else key)
        table.add_row(name, str(list(field.shape)), field.dtype.name)
    return table


def environment_keys(environment: EnvDescription) -> dict[Key, Field]:
    """Return the keys that an environment reads and writes, as in a batch."""
    outcome = {("next", *key): field for key, field in environment.outcome().items()}
    return {**environment.observed(), **environment.actions(), **outcome}
