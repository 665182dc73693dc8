"""The faults of CountingEnv occur as documented."""

import time
from typing import Any

import pytest
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.core.description import allocate


@pytest.mark.parametrize("phase", ["create", "reset", "step", "close"])
def test_a_fault_occurs_in_its_phase(phase: Any) -> None:
    def run() -> None:
        env = CountingEnv(fault=Fault("raise", phase))
        env.bind(allocate(env.description.row()))
        env.reset_row(0)
        env.step_row()
        env.close()

    with pytest.raises(CountingError, match=phase):
        run()


def test_a_fault_occurs_once_after_the_calls_that_succeed() -> None:
    env = CountingEnv(fault=Fault("raise", "reset", at=1))
    env.bind(allocate(env.description.row()))
    env.reset_row(0)
    with pytest.raises(CountingError):
        env.reset_row(1)
    env.reset_row(2)


def test_the_environment_continues_after_a_sleep_fault() -> None:
    env = CountingEnv(fault=Fault("sleep", "reset", seconds=0.2))
    env.bind(allocate(env.description.row()))
    begin = time.perf_counter()
    env.reset_row(0)
    assert time.perf_counter() - begin >= 0.2
