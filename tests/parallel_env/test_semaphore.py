"""A post is taken once and wakes a waiting process; waits have a limit, and spin."""

import mmap
import pickle
import subprocess
import sys
import time

import pytest
from support.processes import SOON

from marl_collect.parallel_env.semaphore import Semaphore
from marl_collect.processes.shared_memory import Segment

Semaphores = tuple[Semaphore, Semaphore]


@pytest.fixture
def semaphores() -> Semaphores:
    buffer = mmap.mmap(-1, 4096)
    return Semaphore(buffer, 64, fresh=True), Semaphore(buffer, 64, fresh=False)


def test_a_wait_has_a_time_limit(semaphores: Semaphores) -> None:
    _, sleeper = semaphores
    begin = time.monotonic()
    assert not sleeper.sleep(0.05)
    assert 0.04 < time.monotonic() - begin < SOON


def test_a_new_semaphore_is_empty() -> None:
    buffer = mmap.mmap(-1, 4096)
    Semaphore(buffer, 0, fresh=True).post()
    assert not Semaphore(buffer, 0, fresh=True).acquire()


def test_the_memory_stays_mapped_while_the_semaphore_exists() -> None:
    buffer = mmap.mmap(-1, 4096)
    semaphore = Semaphore(buffer, 0, fresh=True)
    with pytest.raises(BufferError):
        buffer.close()
    semaphore.post()
    assert semaphore.acquire()


ANSWERER = """
import pickle, sys
from marl_collect.processes.shared_memory import Segment
from marl_collect.parallel_env.semaphore import Semaphore

buffer = Segment.attach(pickle.load(sys.stdin.buffer)).buffer
asked, answered = (Semaphore(buffer, at, fresh=False) for at in (0, 64))
for _ in range(100):
    if asked.sleep(60.0):
        answered.post()
"""


def test_processes_wake_each_other() -> None:
    segment = Segment.create(4096, "test")
    request = Semaphore(segment.buffer, 0, fresh=True)
    answered = Semaphore(segment.buffer, 64, fresh=True)
    command = [sys.executable, "-c", ANSWERER]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        pickle.dump(segment.handle, process.stdin)
        process.stdin.close()
        for _ in range(100):
            request.post()
            assert answered.sleep(SOON)
    assert process.returncode == 0


# Spinning before sleeping


class Counted:
    """A semaphore that counts looks for posts, and notes sleeps instead of sleeping."""

    def __init__(self, spin: float) -> None:
        semaphore = Semaphore(mmap.mmap(-1, 4096), 0, fresh=True, spin=spin)
        acquire = semaphore.acquire
        self.post, self.wait = semaphore.post, semaphore.wait
        self.looks = 0
        self.sleeps: list[float] = []

        def look() -> bool:
            self.looks += 1
            return acquire()

        def sleep(seconds: float) -> bool:
            self.sleeps.append(seconds)
            return acquire()

        vars(semaphore).update(acquire=look, sleep=sleep)


def test_without_time_to_spin_it_sleeps_at_once() -> None:
    posted = Counted(0.0)
    assert not posted.wait(3.0)
    assert (posted.looks, posted.sleeps) == (0, [3.0])


def test_a_post_while_spinning_is_taken_without_sleep() -> None:
    posted = Counted(60.0)
    for _ in range(3):
        posted.post()
        assert posted.wait(3.0)
    assert (posted.looks, posted.sleeps) == (3, [])


def test_it_spins_for_the_given_time_and_then_sleeps() -> None:
    posted = Counted(1e-3)
    assert not posted.wait(3.0)
    assert posted.looks > 1
    assert posted.sleeps == [3.0]


def test_spinning_in_vain_becomes_rarer() -> None:
    posted = Counted(1e-5)
    looked = []
    for k in range(300):
        before = posted.looks
        posted.wait(3.0)
        if posted.looks > before:
            looked.append(k)
    # In the first two, then after 2 waits asleep, 6, 14, 30, 62, and 62 again.
    assert looked == [0, 1, 4, 11, 26, 57, 120, 183, 246]
    assert len(posted.sleeps) == 300


def test_after_a_success_every_wait_spins_again() -> None:
    posted = Counted(1e-5)
    for _ in range(3):  # The third is asleep, and so is the next.
        posted.wait(3.0)
    posted.post()
    assert posted.wait(3.0)
    posted.post()
    assert posted.wait(3.0)
    for _ in range(2):
        before = posted.looks
        posted.wait(3.0)
        assert posted.looks > before
