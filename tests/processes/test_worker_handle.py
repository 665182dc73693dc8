"""Races between the last messages of a worker and its end."""

import pickle
import socket
from multiprocessing.connection import Connection  # noqa: TID251 - what it uses
from typing import Any

import pytest

from marl_collect.errors import WorkerError
from marl_collect.processes.status_board import StatusBoard
from marl_collect.processes.worker_handle import WorkerHandle


class DyingChild:
    """Writes its last messages just before its exit code is read."""

    pid = 123
    sentinel = 0

    def __init__(self, last_words: list[object]) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())  # To a WorkerHandle.
        self._theirs = Connection(theirs.detach())
        self._last_words = last_words

    def poll(self) -> int:
        for message in self._last_words:
            self._theirs.send_bytes(pickle.dumps(message))
        self._last_words = []
        self._theirs.close()
        return -9

    def describe_end(self) -> str:
        return "as it should"


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_messages_written_between_two_checks_are_read_before_the_death(
    reads_ahead: bool,
) -> None:
    status_board = StatusBoard.create(1)
    child: Any = DyingChild(["first", "second"])
    handle = WorkerHandle(0, status_board.lines[0], child, child.connection)
    if reads_ahead:
        handle.read_ahead()
    assert [handle.next_message(), handle.next_message()] == ["first", "second"]
    for read in (handle.next_message, handle.read_ahead, handle.next_message):
        with pytest.raises(WorkerError, match="unexpectedly in start: as it should"):
            read()
    status_board.close()
