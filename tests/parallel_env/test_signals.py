"""Commands reach the processes they are for, and the last finisher is noticed."""

import threading

import pytest

from marl_collect.memory import Segment
from marl_collect.parallel_env.signals import (
    Operation,
    Signals,
    SignalsShape,
    operation_of,
)

SOON = 20.0


def both_ends(**changes):
    sizes = {"processes": 3, "groups": 2, "environments": 5, "spin": 0.0} | changes
    shape = SignalsShape(**sizes)
    segment = Segment.create(Signals.nbytes(shape), "test")
    return Signals(segment, shape), Signals(segment, shape)


@pytest.mark.parametrize("processes", [1, 3, 17, 64, 65])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_flags_fit_into_their_memory(processes, groups):
    shape = SignalsShape(processes, groups, 2 * processes + 1, 0.0)
    signals = Signals(Segment.create(Signals.nbytes(shape), "test"), shape)
    assert len(signals.seeds) == shape.environments
    assert signals._end <= Signals.nbytes(shape)


def test_a_command_is_seen_by_those_it_is_for_until_they_finish():
    trainer, worker = both_ends()
    trainer.publish(1, Operation.RESET_CHOSEN, [0, 2])
    trainer.ring()

    assert worker.command(0, 0) is None
    assert worker.command(1, 1) is None
    number = worker.command(1, 0)
    assert number is not None
    assert operation_of(number) == Operation.RESET_CHOSEN
    assert trainer.pending(1) == [0, 2]
    worker.finish(1, 0, number)
    assert worker.command(1, 0) is None
    assert not trainer.done(1)
    assert trainer.done(0)
    worker.finish(1, 2, number)
    assert trainer.done(1)


def test_numbers_wrap_around():
    trainer, worker = both_ends()
    trainer._ring[0] = 2**32 - 2
    for _ in range(3):
        trainer.publish(0, Operation.STEP, range(3))
        trainer.ring()
        for p in range(3):
            number = worker.command(0, p)
            assert number is not None
            worker.finish(0, p, number)
        assert trainer.done(0)
    assert trainer.rung == 1


@pytest.mark.parametrize("spin", [0.0, 1e-4])
def test_no_wake_up_is_lost(spin):
    """Threads in the place of processes: many rounds, each with a sleep or nearly."""
    trainer, worker = both_ends(spin=spin)
    stop = threading.Event()

    def work(p):
        while not stop.is_set():
            rung = worker.rung
            number = worker.command(0, p)
            if number is None:
                worker.listen(p, rung, SOON)
            else:
                worker.finish(0, p, number)

    threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        trainer.publish(0, Operation.STEP, range(3))
        trainer.ring()
        while not trainer.spin(0):
            # A lost wake-up would show as a sleep that takes its whole time.
            if trainer.sleep(0, SOON):
                break
            assert not trainer.pending(0) or not stop.wait(0)
    stop.set()
    trainer.ring()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


def test_the_trainer_does_not_sleep_when_a_worker_has_failed():
    trainer, worker = both_ends()
    trainer.publish(0, Operation.STEP, [0])
    worker.failed[0] = 1
    assert not trainer.sleep(0, 1000.0)
