"""The worker's end of a pool: its socket to the trainer, its status line, and calls."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, Final, final

from marl_collect.errors import Failure, raise_failure
from marl_collect.processes import pickling
from marl_collect.processes.status_board import MESSAGES_READ, PHASE, Line, Phase

Call = tuple[str, tuple[Any, ...]]
"""A worker's method and its arguments; the only reply is what it returns."""


Attempt = tuple[bytes, Failure | None]
"""What code of the user returned, pickled, and what it raised, if it did.

The worker survives that. A ``Failure`` alone says that the worker ends.
"""


def attempt(
    function: Callable[..., Any], *arguments: Any, environment: int | None = None
) -> Attempt:
    """Call code of the user; return its pickled result, or what it raised.

    It is pickled here, so that a result which cannot be sent is such an error too.

    Args:
        function: the code.
        arguments: of it.
        environment: to name in the error.
    """
    try:
        value = function(*arguments)
        try:
            return pickling.dumps(value), None
        except Exception as error:
            raise TypeError(
                f"The result is a {type(value).__name__}, which cannot be sent from a "
                f"worker process: {error}"
            ) from error
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        return b"", Failure.capture(error, os.getpid(), environment=environment)


def result(reply: Attempt, worker: int) -> Any:
    """Return the result of ``attempt`` in a worker.

    Raises:
        Exception: what the user's code raised there, from a ``WorkerError``.
    """
    value, failure = reply
    if failure is not None:
        raise_failure(failure, worker)
    return pickle.loads(value)


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
        self.has_failed = False
        """Whether the trainer was told that this worker fails."""

    def receive(self) -> Any:
        """Wait for the trainer's next message, in ``Phase.IDLE``, and return it.

        The phase is ``Phase.COMMAND`` from then on.

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
        # Before the message counts as read: otherwise the worker would seem idle.
        self.line.cells[PHASE] = Phase.COMMAND
        self.line.cells[MESSAGES_READ] += 1
        return pickle.loads(data)

    def has_message(self) -> bool:
        """Return whether ``receive`` would return or raise without blocking."""
        return self.connection.poll()

    def send(self, message: object) -> None:
        """Send a message to the trainer; ``WorkerPool.receive`` returns it.

        Raises:
            EOFError: the trainer closed the pool; see ``receive``.
        """
        data = pickling.dumps(message)
        try:
            self.connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
            raise EOFError("the trainer closed the pool") from None

    def fail(self, exception: BaseException) -> None:
        """Tell the trainer that this worker ends with ``exception``.

        Call it before anything that may hang or fail as well, such as closing an
        environment. Afterwards the phase is ``Phase.CLOSE``. Only the first call sends.
        """
        if self.has_failed:
            return
        self.has_failed = True
        line = self.line
        failure = Failure.capture(
            exception, os.getpid(), line.phase.label, line.environment
        )
        # Sending fails if the trainer has closed the pool in the meantime.
        with suppress(OSError):
            self.connection.send_bytes(pickling.dumps(failure))
        self.line.enter(Phase.CLOSE)

    @contextmanager
    def closing(self, close: Callable[[], object]) -> Iterator[None]:
        """Close environments at the end of a block, in ``Phase.CLOSE``.

        An error in the block is reported first, because closing may hang or fail too;
        how closing fails is then of no interest.
        """
        try:
            yield
        except BaseException as error:
            if not self.closed:
                self.fail(error)
            raise
        finally:
            self.line.enter(Phase.CLOSE)
            with suppress(Exception) if self.has_failed else nullcontext():
                close()

    def __repr__(self) -> str:
        return f"WorkerContext(index={self.index}, pid={os.getpid()})"
