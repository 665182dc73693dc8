"""Detection of hangs, with a fake clock."""

from collections.abc import Iterator
from random import Random

import pytest

from marl_collect.processes import hang
from marl_collect.processes.hang import HangWatch
from marl_collect.processes.status_board import (
    MESSAGES_READ,
    STEPS,
    Line,
    Phase,
    StatusBoard,
)

Found = tuple[int, float] | None


class Clock:
    """Replaces the time module."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hang, "time", clock)
    return clock


@pytest.fixture
def status_board() -> Iterator[StatusBoard]:
    status_board = StatusBoard.create(2)
    yield status_board
    status_board.close()


def goes_on(worker: int) -> bool:
    del worker
    return False


@pytest.fixture
def watch(status_board: StatusBoard, clock: Clock) -> HangWatch:
    return HangWatch(status_board, 50.0, goes_on)


@pytest.fixture
def line(status_board: StatusBoard) -> Line:
    """The line of a worker that steps."""
    status_board.lines[0].enter(Phase.STEP)
    return status_board.lines[0]


def look(watch: HangWatch, clock: Clock, seconds: int) -> Found:
    """Check worker 0 every second for a while; return the first finding."""
    for _ in range(seconds):
        clock.now += 1
        hung = watch.find({0: 0}, 10.0)
        if hung:
            return hung
    return None


class Stopwatches:
    """Says what a watch should find, with plain lists; changes what it watches."""

    def __init__(self, random: Random, now: float) -> None:
        self.random = random
        self.timeout = random.choice([None, 8.0, 40.0])
        self.start = random.choice([None, 20.0, 50.0])
        self.board = StatusBoard.create(3)
        self.stopped: set[int] = set()
        self.seen = [line.cells.tolist() for line in self.board.lines]
        self.quiet, self.checked, self.sent = [0.0] * 3, [now] * 3, [0] * 3

    def change(self) -> None:
        """Mostly nothing; or a worker steps, begins something, reads or stops."""
        worker, event = self.random.randrange(3), self.random.randrange(40)
        line = self.board.lines[worker]
        if event == 0:
            line.cells[STEPS] += 1
        elif event == 1:
            line.enter(self.random.choice(list(Phase)))
        elif event == 2:
            self.sent[worker] += 1
        elif event == 3:
            line.cells[MESSAGES_READ] = self.sent[worker]
        elif event == 4:
            self.stopped ^= {worker}

    def hangs(self, worker: int, now: float) -> Found:
        """Check a worker, unless this was done a moment ago."""
        line, passed = self.board.lines[worker], now - self.checked[worker]
        if passed < min(t for t in (10.0, self.timeout, self.start) if t) / 20:
            return None
        is_starting = line.phase in (Phase.START, Phase.CREATE)
        limit = self.start if is_starting else self.timeout
        unread = line.cells[MESSAGES_READ] < self.sent[worker]
        works = unread or line.phase is not Phase.IDLE
        is_still = works and line.cells.tolist() == self.seen[worker]
        if is_still and limit is None and worker in self.stopped:
            limit = 60.0
        counts = is_still and limit is not None
        added = min(passed, limit / 4) if counts else -self.quiet[worker]
        self.quiet[worker] += added
        self.seen[worker], self.checked[worker] = line.cells.tolist(), now
        return (worker, limit) if limit and self.quiet[worker] >= limit else None


@pytest.mark.parametrize("seed", range(20))
def test_the_first_worker_that_reaches_its_limit_without_progress_is_found(
    seed: int, clock: Clock
) -> None:
    random = Random(seed)
    model = Stopwatches(random, clock.now)
    watch = HangWatch(model.board, model.start, model.stopped.__contains__)
    n_found = 0
    for _ in range(1500):
        clock.now += random.choice([0.02, 0.5, 1.0, 3.0, 300.0])
        model.change()
        workers = sorted(random.sample(range(3), random.choice([1, 3])))
        findings = (model.hangs(worker, clock.now) for worker in workers)
        expected = next(filter(None, findings), None)  # The others are not checked.
        sent = {worker: model.sent[worker] for worker in workers}
        assert watch.find(sent, model.timeout) == expected
        if expected is not None:
            n_found += 1
            watch.restart(expected[0])
            model.quiet[expected[0]] = 0.0
    assert n_found or model.timeout is None
    model.board.close()


def test_a_long_pause_between_two_checks_is_not_a_hang(
    watch: HangWatch, line: Line, clock: Clock
) -> None:
    assert look(watch, clock, 1) is None
    clock.now += 10_000  # Ctrl-Z, then fg; or a learner at work.
    assert watch.find({0: 0}, 10.0) is None
    assert look(watch, clock, 7) is None
    assert look(watch, clock, 2) == (0, 10.0)


def test_checks_are_frequent_enough_for_the_limit(
    status_board: StatusBoard, watch: HangWatch
) -> None:
    assert watch.pause(300.0) == 1.0
    assert watch.pause(0.5) == pytest.approx(0.05)
    assert HangWatch(status_board, None, goes_on).pause(None) == 1.0
