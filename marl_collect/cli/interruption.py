"""Ctrl-C and SIGTERM: heard at any moment, once, and never in the wrong one."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, final

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REPEAT_SECONDS = 1.0


@final
class Interruption:
    """While this is entered, a signal raises KeyboardInterrupt.

    One press of Ctrl-C may arrive twice, from the terminal and from a program between
    it and us: what comes within a second of the first changes nothing. A later one
    interrupts the ending too. A signal may arrive where Python swallows the exception
    (a finaliser, a library's own ``except``), so loops ask ``happened`` too.

    Attributes:
        number: of the signal, 0 if there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._when = 0.0
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def happened(self) -> bool:
        """Whether there was a signal."""
        return self.number != 0

    @property
    def exit_code(self) -> int:
        """What shells expect of a command that this signal ended."""
        return 128 + self.number

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let nothing be interrupted inside; a signal only shows in ``happened``."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # After an interruption nothing but the process's end is left to disturb.
            signal.signal(number, signal.SIG_IGN if self.happened else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        repeated = self.happened and now - self._when < _REPEAT_SECONDS
        self.number, self._when = number, now
        if not repeated and not self._deferred:
            raise KeyboardInterrupt
