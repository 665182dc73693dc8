"""Factories of environments that are collected together."""

import pytest
from workloads.counting import CountingEnv

from marl_collect.core.factories import check_alike


@pytest.mark.parametrize("more_keys", [False, True])
def test_environments_with_other_keys_are_refused(more_keys: bool) -> None:
    plain, with_state = (CountingEnv(state=s).description for s in (False, True))
    pair = (plain, with_state) if more_keys else (with_state, plain)
    with pytest.raises(ValueError, match="but state is .* in environment 1 and"):
        check_alike(*pair, "environment 1", "environment 0")
    check_alike(plain, plain, "environment 1", "environment 0")
