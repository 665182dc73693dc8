"""Which process steps which environments.

Environments are stored in the order of their indices. A group is a contiguous range of
rows, so that a policy can act on it in place. Each process steps a part of every group,
so that no process is idle while the policy acts for another group.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final


@final
@dataclass(frozen=True)
class Spread:
    """The rows of each group, and of each process in it.

    Attributes:
        groups: rows of each group.
        rows: ``rows[g][p]`` are the rows of group ``g`` that process ``p`` steps; may
            be empty.
    """

    groups: tuple[range, ...]
    rows: tuple[tuple[range, ...], ...]

    @classmethod
    def even(cls, environments: int, processes: int, groups: int) -> "Spread":
        """Spread environments so that process loads differ by at most one."""
        bounds = [environments * g // groups for g in range(groups + 1)]
        parts = tuple(range(a, b) for a, b in pairwise(bounds))
        first = 0  # The process that gets the next spare environment.
        rows: list[tuple[range, ...]] = []
        for part in parts:
            share, spare = divmod(len(part), processes)
            start = part.start
            dealt: list[range] = []
            for p in range(processes):
                size = share + ((p - first) % processes < spare)
                dealt.append(range(start, start + size))
                start += size
            rows.append(tuple(dealt))
            first = (first + spare) % processes
        return cls(parts, tuple(rows))

    @property
    def processes(self) -> int:
        """Number of processes."""
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
