"""A post is taken once and wakes a waiting process; waits have a time limit."""

import mmap
import pickle
import subprocess
import sys
import threading
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


def test_a_sleeper_is_woken(semaphores: Semaphores) -> None:
    poster, sleeper = semaphores
    awake = threading.Event()

    def run() -> None:
        if sleeper.sleep(SOON):
            awake.set()

    threading.Thread(target=run, daemon=True).start()
    assert not awake.wait(0.05)
    poster.post()
    assert awake.wait(SOON)


def test_a_semaphore_posted_before_does_not_block(semaphores: Semaphores) -> None:
    poster, sleeper = semaphores
    poster.post()
    begin = time.monotonic()
    assert sleeper.sleep(SOON)
    assert time.monotonic() - begin < SOON / 2


def test_a_post_is_taken_once(semaphores: Semaphores) -> None:
    poster, taker = semaphores
    assert not taker.acquire()
    poster.post()
    assert taker.acquire()
    assert not taker.acquire()


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
