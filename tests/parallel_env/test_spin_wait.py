"""Spinning before sleeping."""

import mmap

from marl_collect.parallel_env.semaphore import Semaphore


class Counted:
    """A semaphore that counts looks for posts, and notes sleeps instead of sleeping.

    Attributes:
        wait: waits on the semaphore.
        post: posts it.
    """

    def __init__(self, spin: float) -> None:
        semaphore = Semaphore(mmap.mmap(-1, 4096), 0, fresh=True, spin=spin)
        acquire, self.post, self.wait = (
            semaphore.acquire,
            semaphore.post,
            semaphore.wait,
        )
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
