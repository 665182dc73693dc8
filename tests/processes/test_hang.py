"""Detection of hangs, with a fake clock."""

from collections.abc import Iterator

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


def look(
    watch: HangWatch, clock: Clock, seconds: float, sent: int = 0, every: float = 1.0
) -> Found:
    """Check worker 0 again and again for a while; return the first finding."""
    for _ in range(int(seconds / every)):
        clock.now += every
        hung = watch.find({0: sent}, 10.0)
        if hung:
            return hung
    return None


def test_any_progress_restarts_the_time_limit(
    watch: HangWatch, line: Line, clock: Clock
) -> None:
    for step in range(5):
        line.cells[STEPS] = step + 1
        assert look(watch, clock, 10) is None
    assert look(watch, clock, 2) == (0, 10.0)


def test_an_idle_worker_does_not_hang_unless_it_leaves_messages_unread(
    status_board: StatusBoard, watch: HangWatch, line: Line, clock: Clock
) -> None:
    line.enter(Phase.IDLE)
    status_board.lines[1].enter(Phase.STEP)  # Nobody waits for it.
    assert look(watch, clock, 100) is None
    assert look(watch, clock, 12, sent=1) == (0, 10.0)
    watch.restart(0)
    line.cells[MESSAGES_READ] = 1
    assert look(watch, clock, 100, sent=1) is None


@pytest.mark.parametrize("phase", [Phase.START, Phase.CREATE])
def test_the_start_has_its_own_limit(
    watch: HangWatch, line: Line, clock: Clock, phase: Phase
) -> None:
    line.enter(phase)
    assert look(watch, clock, 49) is None
    assert look(watch, clock, 3) == (0, 50.0)


def test_without_a_limit_only_a_worker_that_is_stopped_hangs(
    status_board: StatusBoard, clock: Clock
) -> None:
    stopped: set[int] = set()
    watch = HangWatch(status_board, None, stopped.__contains__)
    assert look(watch, clock, 100) is None  # It starts.
    stopped.add(0)

    def look_for(seconds: int) -> Found:
        hung = None
        for _ in range(seconds):
            clock.now += 1
            hung = hung or watch.find({0: 0, 1: 0}, None)
        return hung

    for line in status_board.lines[:2]:
        line.enter(Phase.IDLE)
    assert look_for(200) is None
    for line in status_board.lines[:2]:
        line.enter(Phase.STEP)
    assert look_for(55) is None
    stopped.clear()  # SIGCONT; a long step follows.
    assert look_for(200) is None
    clock.now += 1000
    assert look_for(1) is None
    stopped.add(0)
    assert look_for(55) is None
    assert look_for(10) == (0, 60.0)


def test_a_long_pause_between_two_checks_is_not_a_hang(
    watch: HangWatch, line: Line, clock: Clock
) -> None:
    assert look(watch, clock, 1) is None
    clock.now += 10_000  # Ctrl-Z, then fg; or a learner at work.
    assert watch.find({0: 0}, 10.0) is None
    assert look(watch, clock, 7) is None
    assert look(watch, clock, 2) == (0, 10.0)


def test_frequent_checks_still_reach_the_limit(
    watch: HangWatch, line: Line, clock: Clock
) -> None:
    assert look(watch, clock, 20, every=0.01) == (0, 10.0)


def test_progress_of_other_workers_does_not_count(
    status_board: StatusBoard, watch: HangWatch, line: Line, clock: Clock
) -> None:
    for step in range(9):
        status_board.lines[1].cells[STEPS] = step
        assert look(watch, clock, 1) is None
    assert look(watch, clock, 3) == (0, 10.0)


def test_checks_are_frequent_enough_for_the_limit(
    status_board: StatusBoard, watch: HangWatch
) -> None:
    assert watch.pause(300.0) == 1.0
    assert watch.pause(0.5) == pytest.approx(0.05)
    assert HangWatch(status_board, None, goes_on).pause(None) == 1.0
