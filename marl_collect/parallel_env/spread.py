"""Which process steps which environments.

Environments stand in the order of their indices, whatever steps them; a group is a
run of neighbours, so that a policy can act on a group's rows where they are. Each
process has a share of every group: none is idle while the policy acts for another.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final


@final
@dataclass(frozen=True)
class Spread:
    """Rows of groups, and of each process in them.

    Attributes:
        groups: the rows of each group.
        rows: ``rows[g][p]``, those that process ``p`` steps; may be empty.
    """

    groups: tuple[range, ...]
    rows: tuple[tuple[range, ...], ...]

    @classmethod
    def even(cls, environments: int, processes: int, groups: int) -> "Spread":
        """Spread environments so that no process has two more than another."""
        bounds = [environments * g // groups for g in range(groups + 1)]
        parts = tuple(range(a, b) for a, b in pairwise(bounds))
        first = 0  # The process that is dealt the next spare environment.
        rows: list[tuple[range, ...]] = []
        for part in parts:
            share, spare = divmod(len(part), processes)
            begin = part.start
            dealt: list[range] = []
            for p in range(processes):
                size = share + ((p - first) % processes < spare)
                dealt.append(range(begin, begin + size))
                begin += size
            rows.append(tuple(dealt))
            first = (first + spare) % processes
        return cls(parts, tuple(rows))

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return len(self.rows[0])

    def of_process(self, process: int) -> tuple[range, ...]:
        """Return a process's rows in each group."""
        return tuple(rows[process] for rows in self.rows)

    def members(self, group: int) -> tuple[int, ...]:
        """Return the processes that have environments in a group."""
        return tuple(p for p, rows in enumerate(self.rows[group]) if rows)

    def owners(self) -> list[tuple[int, int]]:
        """Return group and process of each environment."""
        owner = {
            k: (g, p)
            for g, rows in enumerate(self.rows)
            for p, mine in enumerate(rows)
            for k in mine
        }
        return [owner[k] for k in range(len(owner))]
