"""Ctrl-C and SIGTERM: raised once, at any time, or deferred to the end of a section."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self, final

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPEAT_SECONDS = 1.0
FINISHING = (
    "Interrupted: finishing this batch, then saving. Press Ctrl-C again to stop at "
    "once."
)
"""What a training program says when it ends after the batch."""


@final
class Interruption:
    """A context in which SIGINT and SIGTERM raise KeyboardInterrupt.

    One Ctrl-C may arrive twice, from the terminal and from a program that started this
    one, so a second signal within one second is ignored. A later one interrupts the
    shutdown too. Python swallows the exception in some places (finalisers, ``except``
    clauses of libraries), so loops must check ``happened`` as well. An instance whose
    context was not entered handles no signals and defers nothing.

    Attributes:
        number: number of the last signal, 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._when = 0.0
        self._deferred = False
        self._notify: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def happened(self) -> bool:
        """Whether a signal arrived."""
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect after this signal: 128 plus its number."""
        return 128 + self.number

    @contextmanager
    def deferred(self, notify: Callable[[], None] | None = None) -> Iterator[None]:
        """Return a context in which a signal sets ``happened`` but raises nothing.

        Args:
            notify: makes the section one that takes long. It is called at the first
                signal, to tell the user; a later signal raises at once.
        """
        self._deferred, self._notify = True, notify
        try:
            yield
        finally:
            self._deferred, self._notify = False, None

    def raise_if_happened(self) -> None:
        """Raise a signal that was deferred.

        Raises:
            KeyboardInterrupt: if one arrived.
        """
        if self.happened:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            # After an interruption, a further signal could only disturb the exit.
            signal.signal(number, signal.SIG_IGN if self.happened else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        first = not self.happened
        repeated = not first and now - self._when < _REPEAT_SECONDS
        self.number, self._when = number, now
        if repeated:
            return
        if not self._deferred:
            raise KeyboardInterrupt
        if self._notify is not None:
            if not first:
                raise KeyboardInterrupt
            self._notify()
