"""The worker's end of a pool: its socket to the trainer and its status line."""

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any, Final, final

import cloudpickle

from marl_collect.processes.status_board import MESSAGES_READ, Line, Phase


@final
class WorkerContext:
    """The worker's end of a `WorkerPool`.

    Attributes:
        index: the worker's index in its pool.
        connection: the socket to the trainer, for use with ``select``. Messages go
            through ``send`` and ``receive``.
        line: the worker's line of the status board.
    """

    def __init__(self, index: int, connection: Connection, line: Line) -> None:
        self.index: Final = index
        self.connection: Final = connection
        self.line: Final = line
        self.closed = False
        """Whether the trainer has closed its end."""

    def receive(self) -> Any:
        """Wait for the trainer's next message, in ``Phase.IDLE``, and return it.

        Raises:
            EOFError: the trainer closed the pool. A main function need not catch
                it: the worker ends with exit code 0.
        """
        self.line.enter(Phase.IDLE)
        try:
            data = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self.closed = True
            raise EOFError("the trainer closed the pool") from None
        self.line.cells[MESSAGES_READ] += 1
        return pickle.loads(data)

    def has_message(self, wait: float = 0.0) -> bool:
        """Return whether ``receive`` would return or raise without blocking.

        Args:
            wait: seconds to wait for a message.
        """
        return self.connection.poll(wait)

    def send(self, message: object) -> None:
        """Send a message to the trainer; ``WorkerPool.receive`` returns it.

        Raises:
            EOFError: the trainer closed the pool; see ``receive``.
        """
        data = cloudpickle.dumps(message, protocol=5)
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
            raise EOFError("the trainer closed the pool") from None

    def __repr__(self) -> str:
        return f"WorkerContext(index={self.index}, pid={os.getpid()})"
