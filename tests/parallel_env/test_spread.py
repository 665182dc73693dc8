"""Each environment has one process, groups are contiguous, loads are even."""

from hypothesis import given
from hypothesis import strategies as st

from marl_collect.parallel_env.env_processes import spread_rows


@given(
    environments=st.integers(1, 40),
    processes=st.integers(1, 12),
    groups=st.integers(1, 4),
)
def test_environments_are_spread_evenly(
    environments: int, processes: int, groups: int
) -> None:
    processes, groups = min(processes, environments), min(groups, environments)
    rows = spread_rows(environments, processes, groups)
    assert len(rows) == groups
    assert all(any(map(len, group)) for group in rows)
    indices = [k for group in rows for part in group for k in part]
    assert indices == list(range(environments))
    loads = [sum(len(group[p]) for group in rows) for p in range(processes)]
    assert max(loads) - min(loads) <= 1
    assert min(loads) >= 1


def test_each_process_has_a_share_of_every_group() -> None:
    first, second = spread_rows(8, 2, 2)
    assert first == [range(2), range(2, 4)]
    assert second == [range(4, 6), range(6, 8)]


def test_the_next_process_gets_the_next_spare_environment() -> None:
    assert spread_rows(2, 2, 2) == [[range(1), range(1, 1)], [range(1, 1), range(1, 2)]]
