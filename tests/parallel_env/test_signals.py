"""Commands reach their processes, and the trainer notices the last one to finish."""

import threading
import time
from functools import partial
from random import Random
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


@pytest.mark.parametrize("seed", range(8))
def test_commands_of_groups_and_processes_are_kept_apart(seed: int) -> None:
    """In any order, also after waits that took a post and were interrupted."""
    random = Random(seed)
    trainer, worker = both_ends()
    trainer._number = 2**30 - 6  # They wrap around.
    orders: list[dict[int, EnvOperation]] = [{}, {}]
    awaited, posts = [False, False], [0, 0, 0]
    for _ in range(100):
        group = random.randrange(2)
        if not awaited[group]:
            operation = random.choice(list(EnvOperation))
            chosen = random.sample(range(3), random.randint(1, 3))
            trainer.command(group, operation, chosen)
            orders[group], awaited[group] = dict.fromkeys(chosen, operation), True
            for process in chosen:
                posts[process] += 1
        elif orders[group] and random.random() < 0.6:
            process = random.choice(list(orders[group]))
            number = pending(worker, group, process)
            assert operation_of(number) == orders[group].pop(process)
            worker.finish(group, process, number)
        else:
            if random.random() < 0.3:
                trainer._done[group].acquire()
            awaited[group] = bool(orders[group])
            assert trainer.sleep(group, 0.0) == (not orders[group])
        assert trainer.awaited == awaited
        for other, left in enumerate(orders):
            assert trainer.pending(other) == sorted(left)
            assert trainer.done(other) == (not left)
            for process in range(3):
                command = worker.pending_command(other, process)
                assert (command is None) == (process not in left)
    assert trainer._number < 50
    for process, count in enumerate(posts):
        assert all(worker.listen(process, 0.0) for _ in range(count))
        assert not worker.listen(process, 0.0)
    trainer.wake([0, 2])
    assert [worker.listen(process, 0.0) for process in range(3)] == [True, False, True]


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
