"""Errors and ends of ParallelEnv inside workers, whose data the oracle compares."""

import signal

import pytest
from support.processes import wait_until_gone
from support.scripts import run_python
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.collectors import MultiSyncCollector
from marl_collect.errors import WorkerError
from marl_collect.parallel_env import ParallelEnv


def test_an_error_inside_a_workers_processes_reaches_the_trainer() -> None:
    faulty = lambda: CountingEnv(fault=Fault("raise", "step", at=3))  # noqa: E731
    collector = MultiSyncCollector(
        [lambda: ParallelEnv(2, faulty)], None, frames_per_batch=40
    )
    with pytest.raises(CountingError) as excinfo:
        next(iter(collector))
    assert isinstance(excinfo.value.__cause__, WorkerError)
    collector.shutdown()


NESTED = """
import os
from marl_collect.collectors import MultiSyncCollector
from marl_collect.parallel_env import ParallelEnv
from workloads.counting import CountingEnv

def make():
    env = CountingEnv()
    # One write: print writes the text and the newline apart where output is unbuffered,
    # and four processes share this pipe.
    os.write(1, b"%d " % os.getpid())
    return env

collector = MultiSyncCollector(
    [lambda: ParallelEnv(2, make, num_processes=2)] * 2, None, frames_per_batch=40
)
next(iter(collector))
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""


def test_processes_of_workers_end_with_the_trainer() -> None:
    process = run_python("-c", NESTED)
    assert process.returncode == -signal.SIGKILL, process.stderr
    *pids, ready = process.stdout.split()
    assert ready == "ready"
    assert len(set(pids)) == 4
    wait_until_gone(map(int, pids))
