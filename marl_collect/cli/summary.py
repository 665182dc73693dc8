"""Tables of data, groups and spaces."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table

from marl_collect.core.description import EnvDescription, Key
from marl_collect.errors import counted
from marl_collect.storage.card import (
    GROUP_COLUMNS,
    SUMMARY,
    group_rows,
    number,
    summaries,
)
from marl_collect.storage.statistics import Range

if TYPE_CHECKING:
    from marl_collect.storage import Trajectories

KeyFacts = tuple[Key, Sequence[int], str]
"""A key, the shape of one frame, and the dtype."""


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
    table = Table("group", "agent", *_right("return"), title=title)
    for name, sums in returns.items():
        for agent, total in zip(environment.groups[name].agents, sums, strict=True):
            table.add_row(name, agent, f"{total / episodes:,.3f}")
    table.add_section()
    team = sum(map(sum, returns.values())) / episodes
    table.add_row("all", "team sum", f"{team:,.3f}", style="bold")
    return table


def episodes_table(episodes: "Trajectories") -> Table:
    """Return a table of the returns of the team and of each agent, and of lengths."""
    title = f"Returns and lengths of {counted(len(episodes), 'episode')}"
    table = Table("group", "agent", *_right(*SUMMARY), title=title)
    for group, agent, *numbers in summaries(episodes):
        cells = (f"{value:,.3f}" for value in numbers)
        style = "bold" if group == "all" else None
        table.add_row(group, agent, *cells, style=style)
    return table


def ranges_table(ranges: Mapping[Key, Range]) -> Table:
    """Return a table of the lowest and highest value of keys."""
    numbers = _right("lowest", "highest", "NaN")
    table = Table(Column("key", overflow="fold"), *numbers, title="Ranges of values")
    for key, values in ranges.items():
        name = repr(key[0] if len(key) == 1 else key)
        table.add_row(name, number(values.low), number(values.high), f"{values.nans:,}")
    return table


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def groups_table(environment: EnvDescription) -> Table:
    """Return a table of the groups: their agents and the spaces of one agent."""
    columns = (Column(name, overflow="fold") for name in GROUP_COLUMNS)
    table = Table(*columns, title="Groups")
    for row in group_rows(environment):
        table.add_row(*row)
    return table


def keys_table(keys: Iterable[KeyFacts], *, title: str = "Keys of a batch") -> Table:
    """Return a table of keys with the shape and dtype of one frame."""
    names = ("key", "shape of a frame", "dtype")
    table = Table(*(Column(name, overflow="fold") for name in names), title=title)
    for key, shape, dtype in keys:
        table.add_row(repr(key[0] if len(key) == 1 else key), str(list(shape)), dtype)
    return table


def environment_keys(environment: EnvDescription) -> list[KeyFacts]:
    """Return the keys that an environment reads and writes, as in a batch."""
    outcome = {("next", *key): leaf for key, leaf in environment.outcome().items()}
    fields = environment.observed() | environment.actions() | outcome
    return [(key, leaf.shape, leaf.dtype.name) for key, leaf in fields.items()]
