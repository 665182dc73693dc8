"""Commands reach their processes, and the trainer notices the last one to finish."""

import threading
import time
from functools import partial
from typing import Any

import pytest
from support.processes import SOON

from marl_collect.parallel_env.signals import EnvOperation, Signals, operation_of
from marl_collect.processes.shared_memory import Segment


def pending(worker: Signals, group: int, process: int) -> int:
    number = worker.pending_command(group, process)
    assert number is not None
    return number


def both_ends(**changes: Any) -> tuple[Signals, Signals]:
    sizes = {"processes": 3, "groups": 2, "environments": 5} | changes
    spin = sizes.pop("spin", 0.0)
    segment = Segment.create(Signals.nbytes(**sizes), "test")
    ends = partial(Signals, segment, tuple(sizes.values()), spin)
    return ends(fresh=True), ends(fresh=False)


@pytest.mark.parametrize("processes", [1, 3, 17, 64, 65])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_flags_fit_into_their_memory(processes: int, groups: int) -> None:
    sizes = processes, groups, 2 * processes + 1
    segment = Segment.create(Signals.nbytes(*sizes), "test")
    signals = Signals(segment, sizes, 0.0, fresh=True)
    assert len(signals.seeds) == 2 * processes + 1
    assert signals._end <= Signals.nbytes(*sizes)


def test_a_command_wakes_only_its_processes() -> None:
    trainer, worker = both_ends()
    trainer.command(0, EnvOperation.STEP, [1])
    assert worker.listen(1, SOON)
    assert not worker.listen(1, 0.0)
    assert not worker.listen(0, 0.0)
    trainer.wake(range(3))
    assert all(worker.listen(p, SOON) for p in range(3))


def test_a_command_is_awaited_until_it_was_waited_for() -> None:
    trainer, worker = both_ends()
    assert not trainer.awaited[0]
    trainer.command(0, EnvOperation.STEP, [1])
    assert trainer.awaited[0]
    assert not trainer.awaited[1]
    assert not trainer.sleep(0, 0.0)
    assert trainer.awaited[0]
    worker.finish(0, 1, pending(worker, 0, 1))
    assert trainer.sleep(0, SOON)
    assert not trainer.awaited[0]


def test_the_end_is_noticed_after_an_interrupted_wait() -> None:
    trainer, worker = both_ends()
    trainer.command(0, EnvOperation.STEP, [1])
    worker.finish(0, 1, pending(worker, 0, 1))
    assert trainer._done[0].acquire()
    assert trainer.sleep(0, 0.0)


def test_commands_are_pending_until_they_are_finished_and_numbers_wrap_around() -> None:
    trainer, worker = both_ends()
    trainer._number = 2**30 - 2
    for _ in range(3):
        trainer.command(1, EnvOperation.RESET_CHOSEN, range(3))
        assert worker.pending_command(0, 1) is None
        for process in range(3):
            assert trainer.pending(1) == [*range(process, 3)]
            assert not trainer.done(1)
            number = pending(worker, 1, process)
            assert operation_of(number) == EnvOperation.RESET_CHOSEN
            worker.finish(1, process, number)
            assert worker.pending_command(1, process) is None
        assert trainer.done(1)
    assert trainer._number == 1


@pytest.mark.parametrize("spin", [0.0, 1e-4])
def test_no_wake_up_is_lost(spin: float) -> None:
    """Threads instead of processes: many rounds, each with a sleep or almost one."""
    trainer, worker = both_ends(spin=spin)
    stop = threading.Event()

    def work(process: int) -> None:
        while not stop.is_set():
            assert worker.listen(process, SOON)
            number = worker.pending_command(0, process)
            if number is not None:
                worker.finish(0, process, number)

    threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in range(3)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    for _ in range(500):
        trainer.command(0, EnvOperation.STEP, range(3))
        while not trainer.sleep(0, SOON):
            # A lost wake-up would show as a sleep that takes its whole time.
            assert time.monotonic() - begin < SOON
    stop.set()
    trainer.wake(range(3))
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


@pytest.mark.parametrize("group", [0, 1])
def test_the_trainer_does_not_sleep_when_a_worker_has_failed(group: int) -> None:
    trainer, worker = both_ends()
    trainer.command(group, EnvOperation.STEP, [0])
    worker.fail(0)
    begin = time.monotonic()
    assert not trainer.sleep(group, SOON)
    assert time.monotonic() - begin < SOON / 2
    assert trainer.failed[0]
