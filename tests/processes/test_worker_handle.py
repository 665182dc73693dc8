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


def handle_of(child: Any, status_board: StatusBoard) -> WorkerHandle:
    return WorkerHandle(0, status_board.lines[0], child, child.connection)


def test_messages_written_between_two_checks_are_read_before_the_death() -> None:
    status_board = StatusBoard.create(1)
    handle = handle_of(DyingChild(["first", "second"]), status_board)
    assert [handle.next_message(), handle.next_message()] == ["first", "second"]
    for _ in range(2):
        with pytest.raises(
            WorkerError, match="ended unexpectedly in start: as it should"
        ):
            handle.next_message()
    status_board.close()


def test_reading_ahead_loses_nothing() -> None:
    status_board = StatusBoard.create(1)
    handle = handle_of(DyingChild(["first", "second"]), status_board)
    handle.read_ahead()
    assert [handle.next_message(), handle.next_message()] == ["first", "second"]
    with pytest.raises(WorkerError):
        handle.read_ahead()
    status_board.close()
