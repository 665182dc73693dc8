"""Spinning before sleeping."""

from typing import Any

from marl_collect.parallel_env.semaphore import SpinWait


class Posted:
    """A semaphore that records checks and sleeps."""

    def __init__(self) -> None:
        self.posts = 0
        self.looks = 0
        self.sleeps: list[float] = []

    def post(self) -> None:
        self.posts += 1

    def acquire(self) -> bool:
        self.looks += 1
        if not self.posts:
            return False
        self.posts -= 1
        return True

    def sleep(self, seconds: float) -> bool:
        self.sleeps.append(seconds)
        return self.posts > 0 and self.acquire()


def test_without_time_to_spin_it_sleeps_at_once() -> None:
    posted: Any = Posted()
    assert not SpinWait(posted, 0.0).wait(3.0)
    assert (posted.looks, posted.sleeps) == (0, [3.0])


def test_a_post_while_spinning_is_taken_without_sleep() -> None:
    posted: Any = Posted()
    spin_wait = SpinWait(posted, 60.0)
    for _ in range(3):
        posted.post()
        assert spin_wait.wait(3.0)
    assert (posted.looks, posted.sleeps) == (3, [])


def test_it_spins_for_the_given_time_and_then_sleeps() -> None:
    posted: Any = Posted()
    assert not SpinWait(posted, 1e-3).wait(3.0)
    assert posted.looks > 1
    assert posted.sleeps == [3.0]


def test_spinning_in_vain_becomes_rarer() -> None:
    posted: Any = Posted()
    spin_wait = SpinWait(posted, 1e-5)
    looked = []
    for k in range(300):
        before = posted.looks
        spin_wait.wait(3.0)
        if posted.looks > before:
            looked.append(k)
    # In the first two, then after 2 waits asleep, 6, 14, 30, 62, and 62 again.
    assert looked == [0, 1, 4, 11, 26, 57, 120, 183, 246]
    assert len(posted.sleeps) == 300


def test_after_a_success_every_wait_spins_again() -> None:
    posted: Any = Posted()
    spin_wait = SpinWait(posted, 1e-5)
    for _ in range(3):  # The third is asleep, and so is the next.
        spin_wait.wait(3.0)
    posted.post()
    assert spin_wait.wait(3.0)
    posted.post()
    assert spin_wait.wait(3.0)
    for _ in range(2):
        before = posted.looks
        spin_wait.wait(3.0)
        assert posted.looks > before
