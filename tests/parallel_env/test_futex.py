"""Sleepers wake when told, look when the number has changed, and give up in time."""

import mmap
import threading
import time

import pytest

from marl_collect.parallel_env.futex import Futex, PolledWord

SOON = 20.0


@pytest.fixture(params=[Futex, PolledWord])
def shared(request):
    buffer = mmap.mmap(-1, 4096)
    return request.param(buffer, 64), memoryview(buffer)[64:68].cast("I")


def asleep(word, mask=1, value=0):
    """Start a thread that sleeps, and return it with the event of its waking."""
    awake = threading.Event()

    def run():
        word.sleep(value, SOON, mask)
        awake.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return awake


def wake_until(word, awake, mask):
    """Wake until the sleeper, who may not be asleep yet, has woken."""
    deadline = time.monotonic() + SOON
    while not awake.wait(0.01):
        assert time.monotonic() < deadline
        word.wake(mask)


def test_a_sleeper_is_woken(shared):
    word, cell = shared
    awake = asleep(word)
    assert not awake.wait(0.05)
    cell[0] += 1
    wake_until(word, awake, 1)


def test_nobody_sleeps_on_a_number_that_has_changed(shared):
    word, cell = shared
    cell[0] = 5
    begin = time.monotonic()
    word.sleep(4, SOON, 1)
    assert time.monotonic() - begin < SOON / 2


def test_a_sleeper_gives_up_in_time(shared):
    word, _ = shared
    begin = time.monotonic()
    word.sleep(0, 0.05, 1)
    assert 0.04 < time.monotonic() - begin < SOON


def test_a_sleeper_of_another_mask_sleeps_on():
    word = Futex(mmap.mmap(-1, 4096), 0)
    mine, other = asleep(word, mask=1), asleep(word, mask=2)
    wake_until(word, mine, 1)
    assert not other.wait(0.05)
    wake_until(word, other, 2)
