"""Races between what a worker writes and its end, made to happen."""

import pickle
import socket
from multiprocessing.connection import Connection  # noqa: TID251 - what it uses
from typing import Any

import pytest

from marl_collect.errors import WorkerError
from marl_collect.processes.status_board import Board
from marl_collect.processes.worker_handle import Peer


class DyingProcess:
    """Writes its last words just before somebody looks whether it has ended."""

    pid = 123
    sentinel = 0

    def __init__(self, last_words: list[object]) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self._theirs = Connection(theirs.detach())
        self._last_words = last_words

    @property
    def exitcode(self) -> int:
        for message in self._last_words:
            self._theirs.send_bytes(pickle.dumps(message))
        self._last_words = []
        self._theirs.close()
        return -9

    def describe_end(self) -> str:
        return "as it should"

    def join(self, timeout: float) -> bool:
        return True


def test_what_was_written_between_two_looks_comes_before_the_death():
    board = Board.create(1)
    process: Any = DyingProcess(["first", "second"])
    peer = Peer(0, process, board.lines[0])
    assert [peer.take(), peer.take()] == ["first", "second"]
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended unasked in start: as it should"):
            peer.take()
    board.close()


def test_reading_ahead_loses_nothing():
    board = Board.create(1)
    process: Any = DyingProcess(["first", "second"])
    peer = Peer(0, process, board.lines[0])
    peer.read_ahead()
    assert [peer.take(), peer.take()] == ["first", "second"]
    with pytest.raises(WorkerError):
        peer.read_ahead()
    board.close()
