"""Real processes that die, hang, or raise errors."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import cloudpickle
import pytest

from marl_collect.errors import ClosedError, WorkerError
from marl_collect.parallel_env import ParallelEnv
from marl_collect.testing.counting import CountingEnv, CountingError, Fault

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 20.0  # Seconds; far above what any of this takes on a busy machine.
SPREADS = [
    {"num_processes": 1},
    {"num_processes": 3},
    {"num_processes": 3, "groups": 2},
]


def one_of_three(fault):
    """Two healthy environments and, in their middle, one with a fault."""
    healthy = lambda: CountingEnv(deaths=False)  # noqa: E731
    return [healthy, lambda: CountingEnv(deaths=False, fault=fault), healthy]


def gone(pid):
    """Whether a process has ended; zombies have ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids):
    deadline = time.monotonic() + SOON
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, pids
        threading.Event().wait(0.01)


def assert_closed(env, pids):
    assert env.is_closed
    with pytest.raises(ClosedError):
        env.reset()
    env.close()
    assert env.is_closed
    wait_until_gone(pids)


def play_until_error(env):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
        env.rollout(100, break_when_any_done=False)
    return caught.value


@pytest.mark.torchrl_defect("D8")
@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.parametrize("phase", ["reset", "step"])
def test_an_error_is_raised_as_its_own_type(spread, phase):
    at = 2 if phase == "step" else 0
    env = ParallelEnv(3, one_of_three(Fault("raise", phase, at=at)), **spread)
    pids = env.engine().pids
    error = play_until_error(env)

    assert isinstance(error, CountingError)
    cause = error.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.phase, cause.environment) == (phase, 1)
    assert "step_row" in cause.remote_traceback or "reset_row" in cause.remote_traceback
    assert_closed(env, pids)


def test_an_error_of_a_factory_is_raised_at_the_start():
    with pytest.raises(CountingError) as caught:
        ParallelEnv(3, one_of_three(Fault("raise", "create")), num_processes=3)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.phase, cause.environment) == ("create", 1)


def test_an_error_while_closing_is_a_warning():
    env = ParallelEnv(3, one_of_three(Fault("raise", "close")), num_processes=3)
    pids = env.engine().pids
    with pytest.warns(RuntimeWarning, match="fault in close"):
        env.close()
    assert_closed(env, pids)


@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.parametrize("phase", ["reset", "step"])
def test_a_killed_process_is_noticed_at_once(spread, phase):
    at = 2 if phase == "step" else 0
    env = ParallelEnv(3, one_of_three(Fault("kill", phase, at=at)), **spread)
    pids = env.engine().pids
    error = play_until_error(env)

    assert isinstance(error, WorkerError)
    assert error.exitcode == -signal.SIGKILL
    assert (error.phase, error.environment) == (phase, 1)
    assert "killed by SIGKILL" in str(error)
    assert_closed(env, pids)


@pytest.mark.parametrize(
    ("fault", "exitcode"),
    [
        (Fault("exit", at=1), 3),
        (Fault("kill", at=1, signal=signal.SIGSEGV), -signal.SIGSEGV),
    ],
    ids=["exit", "segfault"],
)
def test_a_process_that_ends_by_itself_is_reported(fault, exitcode):
    env = ParallelEnv(3, one_of_three(fault), num_processes=3)
    error = play_until_error(env)
    assert isinstance(error, WorkerError)
    assert error.exitcode == exitcode
    assert env.is_closed


def test_a_process_killed_while_it_waits_is_noticed_by_the_next_step():
    env = ParallelEnv(3, CountingEnv, num_processes=3)
    root = env.rand_action(env.reset())
    os.kill(env.engine().pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="Worker 1 .* killed by SIGKILL"):
        env.step(root)
    assert env.is_closed


@pytest.mark.parametrize("phase", ["reset", "step"])
def test_a_process_that_hangs_is_killed_after_the_timeout(phase):
    faulty = one_of_three(Fault("hang", phase))
    env = ParallelEnv(3, faulty, num_processes=3, timeout=0.5)
    pids = env.engine().pids
    error = play_until_error(env)
    assert isinstance(error, WorkerError)
    assert "hung 0.5 s" in str(error)
    assert (error.phase, error.environment) == (phase, 1)
    assert_closed(env, pids)


def test_a_factory_that_hangs_is_killed_after_the_start_timeout():
    faulty = one_of_three(Fault("hang", "create"))
    with pytest.raises(WorkerError, match=r"hung 0\.5 s in create of environment 1"):
        ParallelEnv(3, faulty, num_processes=3, start_timeout=0.5)


def test_a_process_that_was_stopped_while_idle_is_noticed():
    """The status board shows no pending work, so the trainer sends a message."""
    env = ParallelEnv(2, CountingEnv, num_processes=2, timeout=1.0)
    root = env.rand_action(env.reset())
    os.kill(env.engine().pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"Worker 0 .* hung 1 s"):
        env.step(root)
    assert env.is_closed


def test_a_process_that_is_stopped_for_a_while_continues():
    with ParallelEnv(2, CountingEnv, num_processes=2) as env:
        root = env.rand_action(env.reset())
        pid = env.engine().pids[0]
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
        timer.start()
        env.step(root)
        timer.join()
        env.rand_step(env.reset())


def test_pauses_of_the_trainer_are_not_a_hang():
    with ParallelEnv(2, CountingEnv, timeout=0.3) as env:
        root = env.rand_action(env.reset())
        threading.Event().wait(1.0)
        env.step(root)


def test_a_step_may_take_long_if_its_environments_make_progress():
    """The step of each environment counts as progress."""
    slow = lambda: CountingEnv(fault=Fault("sleep", "step", seconds=0.3))  # noqa: E731
    with ParallelEnv(4, slow, num_processes=1, timeout=0.9) as env:
        env.rand_step(env.reset())


def test_an_interrupted_step_is_finished_by_the_next_call():
    slow = lambda: CountingEnv(  # noqa: E731
        deaths=False, fault=Fault("sleep", "step", at=1, seconds=1.0)
    )
    with ParallelEnv(2, slow, num_processes=2) as env:
        root = env.rand_action(env.reset())
        _, root = env.step_and_maybe_reset(root)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            env.rand_step(root)
        assert not env.is_closed
        after = env.reset()
        assert (after["hunter", "observation"][..., 1] == 0).all()
        assert (
            env.rand_step(after)["next", "hunter", "observation"][..., 1] == 1
        ).all()


SCRIPT = """
import os, sys
from marl_collect.parallel_env import ParallelEnv
from marl_collect.testing.counting import CountingEnv

env = ParallelEnv(2, CountingEnv, num_processes=2)
batch = env.engine()
print(*batch.pids, flush=True)
batch.bind(batch.allocate())
batch.reset([0, 1], [0, 1])
batch.step()
"""


@pytest.mark.torchrl_defect("D5")
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 15)", -15),
    ],
    ids=["end", "exit", "exception", "sigkill", "sigterm"],
)
def test_a_script_without_close_ends_cleanly_and_quickly(end, code):
    """Without a guard for the main module, too."""
    script = textwrap.dedent(SCRIPT) + end
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == code, run.stderr
    if code in (0, 7):
        assert run.stderr == ""
    wait_until_gone([int(pid) for pid in run.stdout.split()])
