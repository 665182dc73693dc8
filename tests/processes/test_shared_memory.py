"""Memory is reserved at once, attached by its handle, and freed with its last user."""

import gc
import os
import pickle
import resource
from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from pool_tools import open_paths
from support.scripts import run_mounted

from marl_collect.processes.shared_memory import Segment, free_memory, readable
from marl_collect.processes.status_board import (
    CELLS,
    STEPS,
    STOP,
    WEIGHTS_READ,
    Phase,
    StatusBoard,
)


def test_arrays_outlive_the_segment() -> None:
    segment = Segment.create(1 << 20, "a test")
    array = np.frombuffer(segment.buffer, np.uint8)
    array.fill(3)
    segment.close()
    segment.close()
    assert int(array.sum()) == 3 << 20


def test_closed_segment_cannot_be_attached() -> None:
    segment = Segment.create(100, "a test")
    handle = segment.handle
    segment.close()
    with pytest.raises(FileNotFoundError):
        Segment.attach(handle)


def test_a_path_that_names_another_segment_by_now_is_not_attached() -> None:
    """Numbers of descriptors, and with them paths, are used again."""
    segment, later = (Segment.create(100, "a test") for _ in range(2))
    stale = replace(segment.handle, path=later.handle.path)
    assert not stale.exists()
    with pytest.raises(
        FileNotFoundError, match="no longer the expected .* its owner closed it"
    ):
        Segment.attach(stale)


def test_a_segment_takes_one_file_descriptor() -> None:
    before = open_paths()
    segments = [Segment.create(100, "a test") for _ in range(5)]
    attached = [Segment.attach(segment.handle) for segment in segments]
    assert open_paths() == before + 10
    del segments, attached
    assert open_paths() == before


def test_sizes_are_readable() -> None:
    assert readable(10) == "10 B"
    assert readable(3 << 20) == "3.0 MiB"
    free = free_memory()
    assert free is None or free > 0


def test_a_limit_on_the_size_of_files_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"2.0 MiB .* limited to 1.0 MiB .*ulimit -f"):
            Segment.create(1 << 21, "The moon")
        Segment.create(1 << 19, "The moon").close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.mounts
def test_a_missing_proc_is_named() -> None:
    code = (
        "from marl_collect.processes.shared_memory import Segment; "
        "Segment.create(9, 'The moon')"
    )
    process = run_mounted("/proc", code)
    assert "/proc is not mounted here" in process.stderr
    assert "unknown" not in process.stderr


@pytest.mark.forks
def test_ordinary_memory_needs_no_file_and_is_zero() -> None:
    gc.collect()  # Else what earlier tests have left may be closed meanwhile.
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment.ordinary(1 << 16, "a test")
    assert len(os.listdir("/proc/self/fd")) == before
    assert segment.buffer[:] == bytes(1 << 16)
    segment.buffer[3] = 7
    child = os.fork()
    if child == 0:
        segment.buffer[3] = 8
        os._exit(segment.buffer[3])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
    assert segment.buffer[3] == 7
    segment.close()


def test_shared_memory_of_another_system_names_what_runs_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(OSError, match="needs Linux. `Collector`"):
        Segment.create(9, "The moon")
    Segment.ordinary(9, "The moon").close()


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
    assert line.environment == 3
    line.enter(Phase.IDLE)
    assert line.environment is None
    line.cells[:] = array("q", [12] * CELLS)
    line.clear()
    assert (line.phase, line.environment) == (Phase.START, None)
    assert line.cells.tolist() == [12 * (cell == STEPS) for cell in range(CELLS)]
