"""The status board and its memory."""

import os
import pickle

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


def test_values_written_by_one_side_are_read_by_the_other() -> None:
    owner = StatusBoard.create(3)
    other = StatusBoard.attach(pickle.loads(pickle.dumps(owner.handle)))
    other.lines[1].enter(Phase.RESET, environment=0)
    other.lines[1].cells[STEPS] = 12
    other.lines[1].cells[WEIGHTS_READ] = 4
    owner.lines[1].cells[STOP] = 1
    progress = owner.lines[1].read()
    assert (progress.phase, progress.steps) == (Phase.RESET, 12)
    assert (progress.environment, owner.lines[1].cells[WEIGHTS_READ]) == (0, 4)
    assert other.lines[1].cells[STOP]
    owner.close()


def test_lines_do_not_touch_each_other() -> None:
    status_board = StatusBoard.create(3)
    for cell in range(CELLS):
        status_board.lines[1].cells[cell] = -1
    assert (
        status_board.lines[0].cells.tolist()
        == status_board.lines[2].cells.tolist()
        == [0] * CELLS
    )
    status_board.close()


def test_a_new_or_cleared_line_has_phase_start_and_no_environment() -> None:
    status_board = StatusBoard.create(1)
    line = status_board.lines[0]
    first = line.read()
    assert (first.phase, first.steps, first.environment) == (Phase.START, 0, None)
    line.enter(Phase.STEP, environment=3)
    line.cells[REPLAYED] = 9
    assert line.read().environment == 3
    line.clear()
    assert line.read() == first
    assert line.cells[REPLAYED] == 0
    status_board.close()


def test_entering_a_phase_without_an_environment_forgets_the_last_one() -> None:
    status_board = StatusBoard.create(1)
    status_board.lines[0].enter(Phase.STEP, environment=3)
    status_board.lines[0].enter(Phase.IDLE)
    assert status_board.lines[0].read().environment is None
    status_board.close()


def test_a_handle_whose_file_number_was_taken_by_another_is_noticed() -> None:
    status_board = StatusBoard.create(1)
    number = int(status_board.handle.path.rpartition("/")[2])
    status_board.close()
    other = os.open(os.devnull, os.O_RDWR)
    os.dup2(other, number)
    try:
        with pytest.raises(FileNotFoundError, match="its owner closed it"):
            StatusBoard.attach(status_board.handle)
    finally:
        os.close(number)
        if other != number:
            os.close(other)
