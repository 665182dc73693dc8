"""The status board and its memory."""

import os
import pickle
from collections.abc import Iterator

import pytest

from marl_collect.processes.status_board import (
    CELLS,
    REPLAYED,
    STEPS,
    STOP,
    WEIGHTS_READ,
    Phase,
    StatusBoard,
)


@pytest.fixture
def board() -> Iterator[StatusBoard]:
    board = StatusBoard.create(3)
    yield board
    board.close()


def test_values_written_by_one_side_are_read_by_the_other(board: StatusBoard) -> None:
    other = StatusBoard.attach(pickle.loads(pickle.dumps(board.handle)))
    other.lines[1].enter(Phase.RESET, environment=0)
    other.lines[1].cells[STEPS] = 12
    other.lines[1].cells[WEIGHTS_READ] = 4
    board.lines[1].cells[STOP] = 1
    line = board.lines[1]
    assert (line.phase, line.environment) == (Phase.RESET, 0)
    assert (line.cells[STEPS], line.cells[WEIGHTS_READ]) == (12, 4)
    assert other.lines[1].cells[STOP]


def test_lines_do_not_touch_each_other(board: StatusBoard) -> None:
    for cell in range(CELLS):
        board.lines[1].cells[cell] = -1
    for other in (0, 2):
        assert board.lines[other].cells.tolist() == [0] * CELLS


def test_a_new_or_cleared_line_has_phase_start_and_no_environment(
    board: StatusBoard,
) -> None:
    line = board.lines[0]
    assert (line.phase, line.environment) == (Phase.START, None)
    line.enter(Phase.STEP, environment=3)
    line.cells[REPLAYED] = 9
    assert line.environment == 3
    line.enter(Phase.IDLE)
    assert line.environment is None
    line.cells[STEPS] = 12
    line.clear()
    assert (line.phase, line.environment) == (Phase.START, None)
    assert (line.cells[REPLAYED], line.cells[STEPS]) == (0, 12)


def test_a_handle_whose_file_number_was_taken_by_another_is_noticed(
    board: StatusBoard,
) -> None:
    number = int(board.handle.path.rpartition("/")[2])
    handle = board.handle
    board.close()
    other = os.open(os.devnull, os.O_RDWR)
    os.dup2(other, number)
    try:
        with pytest.raises(FileNotFoundError, match="its owner closed it"):
            StatusBoard.attach(handle)
    finally:
        os.close(number)
        if other != number:
            os.close(other)
