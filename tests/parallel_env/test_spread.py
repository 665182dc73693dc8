"""Each environment has one process, groups are contiguous, loads are even."""

from hypothesis import given
from hypothesis import strategies as st

from marl_collect.parallel_env.env_processes import Spread


@given(
    environments=st.integers(1, 40),
    processes=st.integers(1, 12),
    groups=st.integers(1, 4),
)
def test_environments_are_spread_evenly(
    environments: int, processes: int, groups: int
) -> None:
    processes, groups = min(processes, environments), min(groups, environments)
    spread = Spread.even(environments, processes, groups)

    indices = [k for group in spread.groups for k in group]
    assert indices == list(range(environments))
    dealt = [[k for group_rows in rows for k in group_rows] for rows in spread.rows]
    assert dealt == [list(group) for group in spread.groups]
    loads = [sum(map(len, spread.of_process(p))) for p in range(processes)]
    assert max(loads) - min(loads) <= 1
    assert min(loads) >= 1


def test_each_process_has_a_share_of_every_group() -> None:
    spread = Spread.even(8, 2, 2)
    assert spread.of_process(0) == (range(2), range(4, 6))
    assert spread.of_process(1) == (range(2, 4), range(6, 8))
    assert spread.owners() == [(0, 0)] * 2 + [(0, 1)] * 2 + [(1, 0)] * 2 + [(1, 1)] * 2


def test_members_are_the_processes_with_rows() -> None:
    spread = Spread.even(2, 2, 2)
    assert [spread.members(g) for g in range(2)] == [(0,), (1,)]
